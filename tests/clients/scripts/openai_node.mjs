// The scenarios through openai's package for Node.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  ANSWER,
  ECHO_KEY,
  ECHO_URL,
  EMBEDDING_MODEL,
  KEY,
  MODEL,
  PATIENCE_MS,
  QUESTION,
  UNICODE,
  URL_,
  WEATHER_QUESTION,
  check,
  failure,
  main,
  untilIdle,
} from "./harness.mjs";

const client = new OpenAI({ baseURL: URL_, apiKey: KEY, maxRetries: 0, timeout: PATIENCE_MS });
const echo = new OpenAI({ baseURL: ECHO_URL, apiKey: ECHO_KEY, timeout: PATIENCE_MS });
const user = (content) => [{ role: "user", content }];
const ask = { model: MODEL, messages: user(QUESTION), temperature: 0, max_tokens: 24 };
const parameters = {
  type: "object",
  properties: {
    city: { type: "string", maxLength: 8 },
    unit: { type: "string", enum: ["celsius", "fahrenheit"] },
  },
  required: ["city", "unit"],
  additionalProperties: false,
};
const forced = {
  model: MODEL,
  messages: user(WEATHER_QUESTION),
  tools: [{ type: "function", function: { name: "get_weather", parameters } }],
  tool_choice: "required",
  parallel_tool_calls: false,
  temperature: 0,
  max_tokens: 60,
};
const long = { model: MODEL, messages: user("Count."), max_tokens: 1500, ignore_eos: true };
const Capital = z.object({ city: z.string().max(12), inhabitants: z.number().int().min(0).max(99) });

const create = (body, options) => client.chat.completions.create(body, options);

async function all(stream) {
  const found = [];
  for await (const each of await stream) found.push(each);
  return found;
}

const textOf = (chunks) => chunks.map((c) => c.choices[0]?.delta.content ?? "").join("");

const keysOf = (call) => Object.keys(JSON.parse(call.function.arguments)).sort().join();

await main({
  async chat_plain() {
    const answer = await create(ask);
    check(answer.choices[0].message.content === ANSWER, answer);
    check(answer.choices[0].finish_reason === "stop", answer);
    check(answer.id.startsWith("chatcmpl-") && answer.model === MODEL, answer);
    check(Math.abs(answer.created - Date.now() / 1000) < 600, answer.created);
    const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
    check(total_tokens === prompt_tokens + completion_tokens, answer.usage);
  },

  async chat_streamed() {
    const chunks = await all(create({ ...ask, stream: true }));
    check(textOf(chunks) === ANSWER, chunks);
    check(new Set(chunks.map((c) => `${c.id} ${c.created} ${c.model}`)).size === 1, chunks);
    const ends = chunks.map((c) => c.choices[0].finish_reason).filter((reason) => reason !== null);
    check(ends.join() === "stop", ends);
  },

  async chat_stream_helper() {
    let text = "";
    const runner = client.chat.completions.stream(ask).on("content", (delta) => (text += delta));
    const answer = await runner.finalChatCompletion();
    check(text === ANSWER && answer.choices[0].message.content === ANSWER, answer);
    check((await runner.finalMessage()).role === "assistant", answer);
  },

  async chat_usage() {
    const plain = (await create(ask)).usage;
    const stream_options = { include_usage: true };
    const chunks = await all(create({ ...ask, stream: true, stream_options }));
    const last = chunks.pop();
    check(last.choices.length === 0 && chunks.every((c) => c.usage === null), chunks);
    check(last.usage.total_tokens === plain.total_tokens, last.usage, plain);
  },

  async chat_n() {
    const answer = await create({ ...ask, n: 3 });
    check(answer.choices.map((c) => c.index).join() === "0,1,2", answer);
    check(answer.choices.every((c) => c.message.content === ANSWER), answer);
    const streamed = await client.chat.completions.stream({ ...ask, n: 3 }).finalChatCompletion();
    check(streamed.choices.length === 3, streamed);
    check(streamed.choices.every((c) => c.message.content === ANSWER), streamed);
  },

  async chat_stop() {
    for (const stop of [" Paris", ["nowhere", " Paris"]]) {
      const answer = await create({ ...ask, stop });
      check(answer.choices[0].message.content === "The capital of France is", answer);
      check(answer.choices[0].finish_reason === "stop", answer);
      const chunks = await all(create({ ...ask, stop, stream: true }));
      check(textOf(chunks) === "The capital of France is", chunks);
    }
  },

  async chat_length() {
    const answer = await create({ ...ask, max_tokens: 3 });
    check(answer.choices[0].finish_reason === "length", answer);
    check(answer.usage.completion_tokens === 3, answer.usage);
  },

  async chat_logprobs() {
    const answer = await create({ ...ask, logprobs: true, top_logprobs: 2 });
    const content = answer.choices[0].logprobs.content;
    const bytes = Uint8Array.from(content.flatMap((token) => token.bytes));
    check(new TextDecoder().decode(bytes) === ANSWER, content);
    check(content.every((token) => token.top_logprobs.length === 2), content);
    const chunks = await all(create({ ...ask, logprobs: true, top_logprobs: 2, stream: true }));
    const streamed = chunks.flatMap((c) => c.choices[0].logprobs?.content ?? []);
    check(streamed.map((t) => t.token).join("") === ANSWER, streamed);
  },

  async chat_unicode() {
    const body = { ...ask, structured_outputs: { choice: [UNICODE] } };
    check((await create(body)).choices[0].message.content === UNICODE);
    const chunks = await all(create({ ...body, stream: true }));
    check(textOf(chunks) === UNICODE, chunks);
    check(!JSON.stringify(chunks).includes("\ufffd"), chunks);
  },

  async chat_reasoning() {
    const body = { model: "echo", messages: user("<think>Easy.</think>Yes."), max_tokens: 30 };
    const { message } = (await echo.chat.completions.create(body)).choices[0];
    check(message.reasoning.includes("Easy."), message);
    check(message.reasoning === message.reasoning_content, message);
    const chunks = await all(echo.chat.completions.create({ ...body, stream: true }));
    const thought = chunks.map((c) => c.choices[0].delta.reasoning ?? "").join("");
    check(thought === message.reasoning && textOf(chunks) === message.content, chunks);
  },

  async tools_forced() {
    const answer = await create(forced);
    check(answer.choices[0].finish_reason === "tool_calls", answer);
    const [call] = answer.choices[0].message.tool_calls;
    check(call.function.name === "get_weather" && keysOf(call) === "city,unit", call);
  },

  async tools_streamed() {
    const plain = (await create(forced)).choices[0].message.tool_calls[0];
    const chunks = await all(create({ ...forced, stream: true }));
    const deltas = chunks.flatMap((c) => c.choices[0].delta.tool_calls ?? []);
    check(deltas.every((d) => d.index === 0) && deltas[0].id && deltas[0].type === "function", deltas);
    check(deltas.filter((d) => d.id).length === 1 && deltas.length > 3, deltas);
    const joined = deltas.map((d) => d.function.arguments).join("");
    check(joined === plain.function.arguments, joined, plain);
  },

  async tools_stream_helper() {
    const answer = await client.chat.completions.stream(forced).finalChatCompletion();
    const [call] = answer.choices[0].message.tool_calls;
    check(answer.choices[0].finish_reason === "tool_calls", answer);
    check(call.type === "function" && keysOf(call) === "city,unit", call);
  },

  // The SDK's own loop: it calls the function, sends the result back and asks again.
  async tools_result() {
    const seen = [];
    const runner = client.chat.completions.runTools(
      {
        ...forced,
        tool_choice: { type: "function", function: { name: "get_weather" } },
        tools: [
          {
            type: "function",
            function: {
              name: "get_weather",
              parameters,
              parse: JSON.parse,
              function: (given) => (seen.push(given), "21 degrees"),
            },
          },
        ],
      },
      { maxChatCompletions: 2 },
    );
    await runner.done();
    check(seen.length >= 1 && "city" in seen[0], seen);
    check(runner.messages.some((m) => m.role === "tool" && m.content === "21 degrees"), runner.messages);
    const { messages } = runner;
    const after = await create({ ...forced, messages, tool_choice: "none", max_tokens: 8 });
    check(after.choices[0].message.content, after);
  },

  async structured_parse() {
    const response_format = zodResponseFormat(Capital, "capital");
    const body = { ...ask, max_tokens: 60, response_format };
    const answer = await client.chat.completions.parse(body);
    check(Capital.safeParse(answer.choices[0].message.parsed).success, answer);
  },

  async structured_streamed() {
    const response_format = zodResponseFormat(Capital, "capital");
    const stream = client.chat.completions.stream({ ...ask, max_tokens: 60, response_format });
    const answer = await stream.finalChatCompletion();
    check(Capital.safeParse(answer.choices[0].message.parsed).success, answer);
  },

  async completions() {
    const body = { model: MODEL, prompt: "One, two, three,", max_tokens: 6, temperature: 0 };
    const plain = await client.completions.create(body);
    const chunks = await all(client.completions.create({ ...body, stream: true }));
    check(chunks.map((c) => c.choices[0].text).join("") === plain.choices[0].text, chunks);
  },

  async completions_many() {
    const body = { model: MODEL, prompt: ["a", "b"], n: 2, max_tokens: 2 };
    const answer = await client.completions.create(body);
    check(answer.choices.map((c) => c.index).join() === "0,1,2,3", answer);
  },

  async models() {
    const ids = (await all(client.models.list())).map((model) => model.id);
    check(ids.includes(MODEL), ids);
    check((await client.models.retrieve(MODEL)).object === "model");
    const error = await failure(client.models.retrieve("org/no-such-model"));
    check(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", error.message);
  },

  async embeddings() {
    const body = { model: EMBEDDING_MODEL, input: ["a cat", "tax law"] };
    const packed = await client.embeddings.create(body);
    const plain = await client.embeddings.create({ ...body, encoding_format: "float" });
    for (const [i, { embedding }] of packed.data.entries()) {
      const other = plain.data[i].embedding;
      check(embedding.length === other.length && embedding.length > 0, embedding.length);
      check(embedding.every((x, j) => Math.abs(x - other[j]) < 1e-5), "base64 and floats differ");
    }
  },

  async responses_create() {
    const body = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 24 };
    const response = await client.responses.create(body);
    check(response.output_text === ANSWER && response.status === "completed", response);
    check((await client.responses.retrieve(response.id)).output_text === ANSWER);
  },

  async responses_streamed() {
    const body = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 24 };
    const events = await all(client.responses.create({ ...body, stream: true }));
    check(events.every((event, i) => event.sequence_number === i), events);
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    check(deltas.map((event) => event.delta).join("") === ANSWER, deltas);
    check(events.at(-1).type === "response.completed", events.at(-1));
  },

  async responses_stream_helper() {
    const body = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 24 };
    const response = await client.responses.stream(body).finalResponse();
    check(response.output_text === ANSWER, response);
  },

  async responses_tools() {
    const body = {
      model: MODEL,
      input: WEATHER_QUESTION,
      tools: [{ type: "function", name: "get_weather", parameters, strict: true }],
      tool_choice: "required",
      parallel_tool_calls: false,
      temperature: 0,
      max_output_tokens: 60,
    };
    const response = await client.responses.create(body);
    const [call] = response.output.filter((item) => item.type === "function_call");
    check(Object.keys(JSON.parse(call.arguments)).sort().join() === "city,unit", call);
    const streamed = await client.responses.stream(body).finalResponse();
    const [again] = streamed.output.filter((item) => item.type === "function_call");
    check(again.arguments === call.arguments, again);
  },

  async responses_previous() {
    const body = { model: MODEL, input: QUESTION, max_output_tokens: 16 };
    const first = await client.responses.create(body);
    const previous_response_id = first.id;
    const second = await client.responses.create({ ...body, input: "Why?", previous_response_id });
    check(second.usage.input_tokens > first.usage.input_tokens, second.usage);
  },

  async errors() {
    const stranger = new OpenAI({ baseURL: URL_, apiKey: "wrong", maxRetries: 0 });
    const refused = await failure(stranger.chat.completions.create(ask));
    check(refused instanceof OpenAI.AuthenticationError && refused.requestID, refused.message);
    const unknown = await failure(create({ ...ask, model: "gpt-9" }));
    check(unknown instanceof OpenAI.NotFoundError && unknown.code === "model_not_found", unknown.message);
    for (const stream of [false, true]) {
      const bad = await failure(create({ ...ask, temperature: 3, stream }));
      check(bad instanceof OpenAI.BadRequestError && bad.param === "temperature", bad.message);
      check(bad.type === "invalid_request_error", bad.type);
    }
  },

  async retries() {
    const body = { model: "echo", messages: user("word ".repeat(50)), ignore_eos: true };
    const held = { ...body, max_tokens: 3000, stream: true };
    const holders = [
      await echo.chat.completions.create(held),
      await echo.chat.completions.create(held),
    ]; // one is at work, one waits: that is all that this server takes
    const full = await failure(
      echo.chat.completions.create({ ...body, max_tokens: 1 }, { maxRetries: 0 }),
    );
    check([429, 503].includes(full.status), full.message);
    check(Number(full.headers.get("retry-after")) >= 1, full.message);
    setTimeout(() => holders.forEach((holder) => holder.controller.abort()), 300);
    const answer = await echo.chat.completions.create({ ...body, max_tokens: 1 }, { maxRetries: 8 });
    check(answer.choices[0].finish_reason === "length", answer);
  },

  async leaving() {
    const stream = await create({ ...long, stream: true });
    let seen = 0;
    for await (const _ of stream) if (++seen === 3) break; // leaving the loop aborts the request
    await untilIdle();
    const hasty = await failure(create(long, { timeout: 1000 }));
    check(hasty instanceof OpenAI.APIConnectionTimeoutError, hasty.message);
    await untilIdle();
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 500);
    const left = await failure(create(long, { signal: controller.signal }));
    check(left instanceof OpenAI.APIUserAbortError, left.message);
    await untilIdle();
  },

  async raw_headers() {
    const { data, response, request_id } = await create(ask).withResponse();
    check(request_id && request_id === response.headers.get("x-request-id"), request_id);
    check(data._request_id === request_id, data._request_id);
    const headers = { "X-Request-Id": "mine-1" };
    const named = await create(ask, { headers }).asResponse();
    check(named.headers.get("x-request-id") === "mine-1");
  },

  async asynchronous() {
    const answers = await Promise.all([1, 2, 3, 4].map(() => create(ask)));
    check(answers.every((a) => a.choices[0].message.content === ANSWER), answers);
  },
});
