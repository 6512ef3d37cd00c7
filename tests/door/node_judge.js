// Reads streams of requests, a line of base64 each, and says of each what messages Node's HTTP server takes from it.
'use strict';
const http = require('http');
const net = require('net');
const readline = require('readline');

let reading = null;

const server = http.createServer({ requireHostHeader: true, insecureHTTPParser: false, joinDuplicateHeaders: false });
server.httpAllowHalfOpen = true;
server.keepAliveTimeout = 0;
server.requestTimeout = 0;
server.headersTimeout = 0;
server.timeout = 0;

function take(request, response) {
  const mine = reading;
  mine.heads.push([request.method, request.url]);
  const chunks = [];
  const fields = [];
  for (let at = 0; at < request.rawHeaders.length; at += 2) fields.push(request.rawHeaders.slice(at, at + 2));
  request.on('data', (chunk) => chunks.push(chunk));
  request.on('end', () => {
    mine.messages.push({
      method: request.method, target: request.url, version: request.httpVersion, fields,
      body: Buffer.concat(chunks).toString('base64'),
    });
    // Behind a request for another protocol llhttp reads no HTTP.
    const upgrades = request.headers.upgrade !== undefined && /upgrade/i.test(request.headers.connection || '');
    if (upgrades) mine.end = 'silent';
    else if (!response.shouldKeepAlive) mine.end = 'closed';
    response.end();
  });
}

server.on('request', take);
server.on('checkContinue', take);
server.on('checkExpectation', take);
// Without a listener Node ends the connection of a CONNECT; there is none for `upgrade`, so those requests are ordinary.
server.on('connect', (request, socket) => {
  reading.end = 'refused';
  reading.why = 'CONNECT';
  socket.destroy();
});
server.on('clientError', (error, socket) => {
  reading.end = 'refused';
  reading.why = String(error.code || error.message);
  socket.destroy();
});

server.listen(0, '127.0.0.1', () => {
  process.stdout.write(JSON.stringify({ version: `node ${process.version}, llhttp ${process.versions.llhttp}` }) + '\n');
  const waiting = [];
  const next = () => {
    if (reading || !waiting.length) return;
    reading = { messages: [], heads: [], end: 'clean', why: '' };
    const socket = net.connect({ port: server.address().port, host: '127.0.0.1', allowHalfOpen: true });
    // A server that answers 400 by itself (no Host, an Expect it does not know) takes no message.
    let answered = '';
    socket.on('data', (data) => { answered += data.toString('latin1'); });
    socket.on('error', () => {});
    // Node leaves some connections open whose sender has closed his side: behind what came of them it says nothing.
    const patience = setTimeout(() => {
      reading.end = 'silent';
      reading.why = 'the connection stays open';
      socket.destroy();
    }, 1000);
    socket.on('close', () => {
      clearTimeout(patience);
      const refusals = (answered.match(/HTTP\/1\.1 4\d\d /g) || []).length;
      if (refusals && reading.end !== 'refused') {
        reading.end = 'refused';
        reading.why = 'answered with 4xx';
      }
      process.stdout.write(JSON.stringify(reading) + '\n');
      reading = null;
      next();
    });
    socket.end(Buffer.from(waiting.shift(), 'base64'));
  };
  readline.createInterface({ input: process.stdin }).on('line', (line) => { waiting.push(line); next(); });
});
