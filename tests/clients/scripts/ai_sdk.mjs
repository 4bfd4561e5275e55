// The scenarios through the Vercel AI SDK and its provider for OpenAI-compatible servers.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";
import {
  ANSWER,
  ECHO_KEY,
  ECHO_URL,
  EMBEDDING_MODEL,
  KEY,
  MODEL,
  QUESTION,
  URL_,
  WEATHER_QUESTION,
  check,
  failure,
  main,
  untilIdle,
} from "./harness.mjs";

const options = { supportsStructuredOutputs: true, includeUsage: true };
const provider = createOpenAICompatible({ name: "forebay", baseURL: URL_, apiKey: KEY, ...options });
const echo = createOpenAICompatible({ name: "echo", baseURL: ECHO_URL, apiKey: ECHO_KEY, ...options });
const model = provider(MODEL);
const ask = { model, prompt: QUESTION, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const get_weather = ai.tool({
  description: "The temperature in a city",
  inputSchema: z.object({
    city: z.string().max(8),
    unit: z.enum(["celsius", "fahrenheit"]),
  }),
});
const forced = {
  ...ask,
  prompt: WEATHER_QUESTION,
  tools: { get_weather },
  toolChoice: "required",
  maxOutputTokens: 60,
  providerOptions: { forebay: { parallel_tool_calls: false } },
};
const Capital = z.object({ city: z.string().max(12), inhabitants: z.number().int().min(0).max(99) });
const capital = { ...ask, maxOutputTokens: 60, output: ai.Output.object({ schema: Capital }) };

async function all(stream) {
  const found = [];
  for await (const each of stream) found.push(each);
  return found;
}

const keysOf = (call) => Object.keys(call.input).sort().join();

await main({
  async chat_plain() {
    const answer = await ai.generateText(ask);
    check(answer.text === ANSWER && answer.finishReason === "stop", answer.text);
    const { inputTokens, outputTokens, totalTokens } = answer.usage;
    check(inputTokens > 0 && totalTokens === inputTokens + outputTokens, answer.usage);
    check(answer.response.modelId === MODEL, answer.response.modelId);
    check(Math.abs(answer.response.timestamp - Date.now()) < 600_000, answer.response.timestamp);
  },

  async chat_streamed() {
    const result = ai.streamText(ask);
    check((await all(result.textStream)).join("") === ANSWER);
    check((await result.finishReason) === "stop");
  },

  async chat_usage() {
    const result = ai.streamText(ask);
    await all(result.textStream);
    const plain = (await ai.generateText(ask)).usage;
    const usage = await result.usage;
    check(usage.outputTokens === plain.outputTokens, usage, plain);
  },

  async chat_stop() {
    const answer = await ai.generateText({ ...ask, stopSequences: [" Paris"] });
    check(answer.text === "The capital of France is", answer.text);
  },

  async chat_length() {
    const answer = await ai.generateText({ ...ask, maxOutputTokens: 3 });
    check(answer.finishReason === "length", answer.finishReason);
  },

  async chat_reasoning() {
    const said = { ...ask, model: echo("echo"), prompt: "<think>Easy.</think>Yes." };
    const plain = await ai.generateText({ ...said, maxOutputTokens: 30 });
    check(plain.reasoningText.includes("Easy."), plain.reasoningText);
    check(!plain.text.includes("think"), plain.text);
    const result = ai.streamText({ ...said, maxOutputTokens: 30 });
    check((await all(result.textStream)).join("") === plain.text);
    check((await result.reasoningText) === plain.reasoningText);
  },

  async tools_forced() {
    const answer = await ai.generateText(forced);
    check(answer.finishReason === "tool-calls", answer.finishReason);
    const [call] = answer.toolCalls;
    check(call.toolName === "get_weather" && keysOf(call) === "city,unit", call);
  },

  async tools_streamed() {
    const result = ai.streamText(forced);
    const stream = result.fullStream ?? result.stream;
    const deltas = (await all(stream)).filter((part) => part.type === "tool-input-delta");
    check(deltas.length > 3, "the arguments came in one piece", deltas);
    const [call] = await result.toolCalls;
    check(keysOf(call) === "city,unit", call);
    check((await result.finishReason) === "tool-calls");
  },

  // The SDK's own loop of two steps: the second has the tool's result.
  async tools_result() {
    const seen = [];
    const execute = async (given) => (seen.push(given), "21 degrees");
    const answer = await ai.generateText({
      ...forced,
      tools: { get_weather: { ...get_weather, execute } },
      prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {}),
      stopWhen: (ai.isStepCount ?? ai.stepCountIs)(2),
      maxOutputTokens: 40,
    });
    check(seen.length === 1 && answer.steps.length === 2, seen, answer.steps.length);
    check(answer.text, answer.text);
  },

  async structured_parse() {
    const { output } = await ai.generateText(capital);
    check(Capital.safeParse(output).success, output);
  },

  async structured_streamed() {
    const result = ai.streamText(capital);
    const parts = await all(result.partialOutputStream);
    check(parts.length > 1 && Capital.safeParse(await result.output).success, parts);
  },

  async completions() {
    const complete = { ...ask, model: provider.completionModel(MODEL), maxOutputTokens: 6 };
    const plain = await ai.generateText(complete);
    check(plain.text, plain.text);
    check((await all(ai.streamText(complete).textStream)).join("") === plain.text);
  },

  async embeddings() {
    const embed = provider.embeddingModel ?? provider.textEmbeddingModel;
    const { embeddings } = await ai.embedMany({
      model: embed(EMBEDDING_MODEL),
      values: ["a cat", "a kitten", "tax law"],
    });
    const [cat, kitten, law] = embeddings;
    check(ai.cosineSimilarity(cat, kitten) > ai.cosineSimilarity(cat, law) + 0.1);
  },

  async errors() {
    const stranger = createOpenAICompatible({ name: "x", baseURL: URL_, apiKey: "wrong" });
    const refused = await failure(ai.generateText({ ...ask, model: stranger(MODEL) }));
    check(ai.APICallError.isInstance(refused) && refused.statusCode === 401, refused);
    check(!refused.isRetryable, refused);
    const bad = await failure(ai.generateText({ ...ask, temperature: 3 }));
    check(bad.statusCode === 400 && bad.data.error.param === "temperature", bad);
    const unknown = await failure(ai.generateText({ ...ask, model: provider("gpt-9") }));
    check(unknown.statusCode === 404 && unknown.data.error.code === "model_not_found", unknown);
  },

  async leaving() {
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 500);
    const left = await failure(
      ai.generateText({
        ...ask,
        maxOutputTokens: 1500,
        providerOptions: { forebay: { ignore_eos: true } },
        abortSignal: controller.signal,
      }),
    );
    check(left.name === "AbortError", left.name);
    await untilIdle();
  },

  async asynchronous() {
    const answers = await Promise.all([1, 2, 3, 4].map(() => ai.generateText(ask)));
    check(answers.every((answer) => answer.text === ANSWER), answers.map((answer) => answer.text));
  },
});
