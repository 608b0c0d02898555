// One request to the server: its body goes out, its pieces come in, and what goes wrong becomes a sentence.

/** Something that went wrong, told as a sentence for people. */
export class Refusal extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
  }
}

/** What to tell people about any error. */
export function told(error) {
  if (error instanceof Refusal) return error.message;
  console.error(error);
  return "This page made a mistake. Load it again, and tell us what you did.";
}

const UNREACHABLE = "The server did not answer. Is it still running?";
const CUT = "The connection closed before the answer was complete.";
const ODD = "The server sent something that this page cannot read.";

const BY_STATUS = {
  401: "This server asks for an API key.",
  404: "The server does not know this address.",
  408: "The server gave up waiting for the request.",
  413: "The message is too long for this server.",
  429: "The server is busy. Try again in a moment.",
  503: "The server is not ready yet. Try again in a moment.",
};

/** Any JSON from the server, answered with a checked `ok`. */
export async function getJson(path, key) {
  const response = await send(path, { headers: headers(key) });
  try {
    return await response.json();
  } catch {
    throw new Refusal(ODD);
  }
}

/**
 * The pieces of one streamed answer: {kind: "tokens", reasoning, text, tokens} as they come and {kind: "end", ...} last.
 * A token is {text, position}; its position is null where the server does not tell.
 */
export async function* stream(body, key, signal) {
  const response = await send("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, include_origins: true } }),
    signal,
  });
  const end = { kind: "end", finish: null, usage: null, speculative: null, timings: null };
  let done = false;
  for await (const data of events(response.body, signal)) {
    if (data === "[DONE]") {
      done = true;
      break;
    }
    const chunk = parse(data);
    if (chunk.error) throw new Refusal(sentenceOf(chunk, 500));
    yield* pieces(chunk);
    end.finish = chunk.choices?.[0]?.finish_reason ?? end.finish;
    for (const name of ["usage", "speculative", "timings"]) end[name] = chunk[name] ?? end[name];
  }
  if (!done) throw new Refusal(CUT);
  yield end;
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(UNREACHABLE);
  }
  if (response.ok) return response;
  const body = await response.text().catch(() => "");
  throw new Refusal(sentenceOf(body, response.status, response.headers.get("Retry-After")), response.status);
}

/** The data of server-sent events, each as one string. */
async function* events(stream, signal) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + decoder.decode(value, { stream: true })).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } catch (error) {
    if (signal?.aborted) throw new DOMException("stopped", "AbortError");
    throw error instanceof TypeError ? new Refusal(CUT) : error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(data) {
  try {
    const value = JSON.parse(data);
    if (value && typeof value === "object") return value;
  } catch {
    // told below
  }
  throw new Refusal(ODD);
}

function* pieces(chunk) {
  const choice = chunk.choices?.[0];
  const thought = choice?.delta?.reasoning_content;
  const text = thought || choice?.delta?.content || "";
  const told = Array.isArray(choice?.origins) ? choice.origins : [];
  if (!text && !told.length) return;
  const whole = told.map((token) => token.text).join("") === text;
  yield { kind: "tokens", reasoning: Boolean(thought), text, tokens: whole ? told : [{ text, position: null }] };
}

/** What a refusal says, whatever form it has; never JSON. */
export function sentenceOf(body, status, retryAfter = null) {
  const said = messageIn(body);
  if (said) return closed(said);
  if (status === 429 && /^\d+$/.test(retryAfter ?? "")) return `The server is busy. Try again in ${retryAfter} s.`;
  return BY_STATUS[status] ?? `The server could not answer (status ${status}).`;
}

function messageIn(body) {
  let value = body;
  if (typeof body === "string") {
    try {
      value = JSON.parse(body);
    } catch {
      return "";
    }
  }
  const found = [value?.error?.message, value?.error, value?.message, value?.detail?.[0]?.msg, value?.detail];
  return found.find((one) => typeof one === "string" && one.trim() && !/^\s*[[{]/.test(one)) ?? "";
}

/** With a capital, but for names such as top_k, and with its full stop. */
function closed(text) {
  const trimmed = text.trim().replace(/^[a-z]+(?= )/, (word) => word[0].toUpperCase() + word.slice(1));
  return /[.!?]$/.test(trimmed) ? trimmed : `${trimmed}.`;
}
