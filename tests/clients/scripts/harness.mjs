// What the Node scripts share: scenarios by name, one JSON line for each. See harness.py.

const env = process.env;
export const URL_ = env.CLIENTS_URL;
export const KEY = env.CLIENTS_KEY;
export const MODEL = env.CLIENTS_MODEL;
export const ECHO_URL = env.CLIENTS_ECHO_URL;
export const ECHO_KEY = env.CLIENTS_ECHO_KEY;
export const EMBEDDING_MODEL = env.CLIENTS_EMBEDDING_MODEL;

export const QUESTION = "What is the capital of France?";
export const ANSWER = "The capital of France is Paris.";
export const UNICODE = "naïve 한국어 😀";
export const WEATHER_QUESTION = "How warm is it in Paris, in celsius?";

export const PATIENCE_MS = 120_000;

export function check(truth, ...said) {
  if (!truth) throw new Error(said.map((each) => JSON.stringify(each)).join(" ") || "it does not hold");
}

// The error that `promise` is rejected with; fails when there is none.
export async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  throw new Error("nothing was raised");
}

export function until(condition, timeoutMs = PATIENCE_MS) {
  const deadline = Date.now() + timeoutMs;
  return (async () => {
    while (!(await condition())) {
      check(Date.now() < deadline, "the condition stayed false");
      await new Promise((wake) => setTimeout(wake, 50));
    }
  })();
}

// Waits until the engines behind `url` work on nothing.
export function untilIdle(url = URL_) {
  return until(async () => {
    const text = await (await fetch(url.replace(/\/v1$/, "/metrics"))).text();
    const lines = text.split("\n").filter((line) => line.startsWith("vllm:num_requests_running"));
    return lines.every((line) => Number(line.split(" ").at(-1)) === 0);
  });
}

// Runs each function of `scenarios`, or those that the arguments name.
export async function main(scenarios) {
  const asked = process.argv.slice(2);
  for (const name of asked.length ? asked : Object.keys(scenarios)) {
    const started = Date.now();
    let error = "";
    let timer;
    try {
      const late = new Promise((_, reject) => {
        timer = setTimeout(() => reject(new Error("no end in time")), 2 * PATIENCE_MS);
      });
      await Promise.race([scenarios[name](), late]);
    } catch (caught) {
      error = String(caught?.stack ?? caught) || "an error without words";
    }
    clearTimeout(timer);
    console.log(JSON.stringify({ scenario: name, ok: !error, error, ms: Date.now() - started }));
  }
  process.exit(0);
}
