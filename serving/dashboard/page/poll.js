// Polls for the data: less often while the service does not answer, never while the page is hidden or paused.

const PERIOD_MS = 5000;
const LONGEST_MS = 60000;
const TIMEOUT_MS = 10000;
const KEPT = "larder-token";

/** Calls `onData(data)`, `onTrouble(why)` and `onToken(refusal)`; keeps the token in this tab's session storage.

`refusal` is null if no token was sent, "unknown" for an unknown token, "scope" for one that lacks the scope. */
export class Poller {
  constructor({ url, onData, onTrouble, onToken }) {
    Object.assign(this, { url, onData, onTrouble, onToken });
    this.failures = 0;
    this.isPaused = false;
    this.timer = null;
    this.looking = null;
    document.addEventListener("visibilitychange", () => this.look());
    window.addEventListener("online", () => this.look());
  }

  /** Milliseconds until the next poll. */
  get period() {
    return Math.min(LONGEST_MS, PERIOD_MS * 2 ** Math.min(this.failures, 10));
  }

  /** Stops polling, or resumes it at once. */
  pause(isPaused) {
    this.isPaused = isPaused;
    this.look();
  }

  /** Sends this token from now on. */
  use(token) {
    sessionStorage.setItem(KEPT, token);
    this.look();
  }

  /** Polls now, unless paused, hidden or already polling. */
  async look() {
    clearTimeout(this.timer);
    if (this.isPaused || document.hidden) return;
    if (this.looking) return this.looking;
    this.looking = this.#ask().finally(() => (this.looking = null));
    if (await this.looking) this.timer = setTimeout(() => this.look(), this.period);
  }

  async #ask() {
    try {
      const token = sessionStorage.getItem(KEPT);
      const response = await fetch(this.url, {
        headers: token ? { Authorization: `Bearer ${asBytes(token)}` } : {},
        cache: "no-store",
        redirect: "error",
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      if (response.status === 401 || response.status === 403) {
        sessionStorage.removeItem(KEPT);
        this.onToken(token === null ? null : response.status === 403 ? "scope" : "unknown");
        return false;
      }
      if (!response.ok) throw new Error(`it answered ${response.status}`);
      const data = await response.json();
      if (data === null || typeof data !== "object") throw new Error("its answer is not a JSON object");
      this.failures = 0;
      this.onData(data);
    } catch (error) {
      this.failures += 1;
      this.onTrouble(reason(error));
    }
    return true;
  }
}

/** Encodes a text as UTF-8, one character per byte, as a header needs it. */
const asBytes = (text) => Array.from(new TextEncoder().encode(text), (byte) => String.fromCharCode(byte)).join("");

function reason(error) {
  if (error.name === "TimeoutError") return `it did not answer within ${TIMEOUT_MS / 1000} s`;
  if (error.name === "TypeError") return "it cannot be reached";
  if (error.name === "SyntaxError") return "its answer is not JSON";
  return error.message;
}
