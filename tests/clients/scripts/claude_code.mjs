// The scenarios through Anthropic's Claude Code, which speaks to /v1/messages.

import { join } from "node:path";
import { SCRIPTED_KEY, SCRIPTED_MODEL, SCRIPTED_URL, newHome, packages, scenarios, turn } from "./coding_agent.mjs";
import { check, main } from "./harness.mjs";

const binary = join(packages, `@anthropic-ai/claude-code-${process.platform}-${process.arch}/claude`);

function ask(prompt, options = {}) {
  const { home = newHome(), url = SCRIPTED_URL, key = SCRIPTED_KEY, model = SCRIPTED_MODEL, goesOn } = options;
  const args = ["--print", ...(goesOn ? ["--continue"] : []), ...(options.more ?? []), "--allowedTools=Bash,Read", prompt];
  return turn(binary, args, home, {
    ANTHROPIC_BASE_URL: url.replace(/\/v1$/, ""),
    ANTHROPIC_AUTH_TOKEN: key,
    ANTHROPIC_MODEL: model,
    ANTHROPIC_SMALL_FAST_MODEL: model,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  });
}

await main({
  ...scenarios({
    ask,
    shell: (command) => `CALL Bash ${JSON.stringify({ command })}`,
    look: (file_path) => `CALL Read ${JSON.stringify({ file_path })}`,
    noModel: /issue with the selected model \(none\)/,
    noRoom: /Prompt is too long/,
  }),

  async answers_by_a_schema() {
    const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
    const more = ["--output-format=json", `--json-schema=${JSON.stringify(schema)}`];
    const { status, out, all } = await ask('CALL StructuredOutput {"city": "Paris"}', { more });
    check(status === 0 && JSON.parse(JSON.parse(out).result).city === "Paris", all);
  },
});
