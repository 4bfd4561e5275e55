// The scenarios through OpenAI's Codex, which speaks to /v1/responses.

import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { SCRIPTED_KEY, SCRIPTED_MODEL, SCRIPTED_URL, newHome, packages, scenarios, turn } from "./coding_agent.mjs";
import { main } from "./harness.mjs";

function configure(home, url) {
  const lines = [
    'model_provider = "forebay"',
    'sandbox_mode = "danger-full-access"', // it echoes and reads: there may be nothing to make a sandbox with
    "[model_providers.forebay]",
    'name = "forebay"',
    `base_url = "${url}"`,
    'env_key = "FOREBAY_API_KEY"',
    'wire_api = "responses"',
  ];
  writeFileSync(join(home, "config.toml"), lines.join("\n"));
}

function ask(prompt, options = {}) {
  const { home = newHome(), url = SCRIPTED_URL, key = SCRIPTED_KEY, model = SCRIPTED_MODEL, goesOn } = options;
  configure(home, url);
  const resumed = goesOn ? ["resume", "--last"] : [];
  const args = ["exec", ...resumed, "--skip-git-repo-check", "--model", model, prompt];
  const node = [join(packages, "@openai/codex/bin/codex.js"), ...args];
  return turn(process.execPath, node, home, { CODEX_HOME: home, FOREBAY_API_KEY: key });
}

await main(
  scenarios({
    ask,
    shell: (cmd) => `CALL exec_command ${JSON.stringify({ cmd })}`,
    look: (path) => `CALL view_image ${JSON.stringify({ path })}`,
    noModel: /The model 'none' does not exist/,
    noRoom: /ran out of room in the model's context window/,
  }),
);
