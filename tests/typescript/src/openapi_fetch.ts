import createClient from "openapi-fetch";
import type { components, paths } from "./schema";

type Answer = components["schemas"]["Answer"];
type KnownReason = components["schemas"]["KnownReason"];

const unavailable: ReadonlySet<string> = new Set<KnownReason>(["l2_down", "l2_timeout", "breaker_open"]);
const client = createClient<paths>({ baseUrl: process.argv[2] ?? "http://127.0.0.1:8000" });

function show(answer: Answer): string {
  const items: readonly string[] = answer.items ?? [];
  const why = answer.reason === undefined ? "" : unavailable.has(answer.reason) ? "Redis is away" : answer.reason;
  return `${answer.id ?? "-"} ${answer.source} ${items.length} ${why}`;
}

const one = await client.GET("/v1/lookup/{table}/{entity}", {
  params: { path: { table: "user_topk", entity: "u-00042" }, query: { k: 2 } },
});
if (one.data) console.log(show(one.data));

const batch = await client.POST("/v1/lookup/{table}", {
  params: { path: { table: "user_topk" } },
  body: { entities: ["u-00042", { id: 7 }, { id: "new", history: ["i-01302"] }], k: 2 },
});
if (batch.data) for (const answer of batch.data.answers) console.log(show(answer));

const tables = await client.POST("/v1/lookup", {
  body: { entities: [{ id: "u-00042", table: "user_topk" }, { id: "u-00042", table: "user_vector" }] },
});
if (tables.data) for (const answer of tables.data.answers) console.log(answer.table, answer.vector?.length ?? 0);

const ranked = await client.POST("/v1/score", { body: { user: "u-00042", items: ["i-02618", "i-99999"] } });
if (ranked.data) console.log(ranked.data.items, ranked.data.unknown);

const receipt = await client.POST("/v1/events", {
  body: { events: [{ id: "e-1", user: "u-00042", item: "i-02618" }] },
});
if (receipt.data) console.log(receipt.data.accepted, receipt.data.rejected.map((event) => event.reason));
if (receipt.error) console.log(receipt.error.error.code);

const counted = await client.POST("/v1/feedback", { body: { event: "click", canary_key: "u-00042" } });
if (counted.data) console.log(counted.data.arm);

const missing = await client.GET("/v1/lookup/{table}/{entity}", {
  params: { path: { table: "nothing", entity: "u-00042" } },
});
if (missing.error) console.log(missing.response.status, missing.error.error.code, missing.error.error.message);

const health = await client.GET("/readyz");
console.log(health.data?.ready ?? health.error?.ready);
