// OpenAI's own client for JavaScript, in Node.

const OpenAI = require("openai");
const { VERSION } = require("openai/version");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const schema = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const named = { name: "get_weather", description: "Get the weather in a city.", parameters: schema };
const tool = { type: "function", function: named };
const trials = [];

async function trial(what, body) {
  try {
    await body();
    trials.push([what, null]);
  } catch (error) {
    trials.push([what, `${error.name}: ${error.message}`.slice(0, 300)]);
  }
}

function check(isRight, told) {
  if (!isRight) throw new Error(`unexpected: ${JSON.stringify(told)}`);
}

function checkCity(text) {
  check(JSON.parse(text).city === "Paris", text);
}

async function chats() {
  const completions = client.chat.completions;
  await trial("models: list", async () => {
    const ids = [];
    for await (const each of client.models.list()) ids.push(each.id);
    check(ids.length === 1 && ids[0] === model, ids);
  });
  await trial("chat", async () => {
    const answer = await completions.create({ model, messages });
    check(answer.choices[0].message.content && answer.usage.total_tokens, answer);
  });
  await trial("chat, streamed with usage", async () => {
    const stream_options = { include_usage: true };
    const stream = await completions.create({ model, messages, stream: true, stream_options });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    check(text && usage.completion_tokens, [text, usage]);
  });
  await trial("a tool, whole and streamed", async () => {
    const wish = { model, messages, tools: [tool] };
    const answer = await completions.create(wish);
    checkCity(answer.choices[0].message.tool_calls[0].function.arguments);
    const final = await completions.stream(wish).finalChatCompletion();
    checkCity(final.choices[0].message.tool_calls[0].function.arguments);
  });
  await trial("runTools: a function that the client calls", async () => {
    const called = [];
    const weather = { ...named, parse: JSON.parse, function: (given) => called.push(given) && "sunny" };
    const tools = [{ type: "function", function: weather }];
    const text = await completions.runTools({ model, messages, tools }).finalContent();
    check(called.length === 1 && called[0].city === "Paris" && text.includes("sunny"), text);
  });
  await trial("JSON schema", async () => {
    const json_schema = { name: "place", schema, strict: true };
    const response_format = { type: "json_schema", json_schema };
    const wish = { model, messages, response_format, max_tokens: 200, temperature: 0 };
    const answer = await completions.create(wish);
    const [choice] = answer.choices;
    check(choice.finish_reason === "length" || JSON.parse(choice.message.content).city, choice);
  });
}

async function responses() {
  const input = messages[0].content;
  await trial("responses", async () => {
    const first = await client.responses.create({ model, input: "What is 3 + 4?" });
    check(first.status === "completed" && first.output_text, first);
    const next = { model, input: "What is 5 + 6?", previous_response_id: first.id };
    check((await client.responses.create(next)).output_text, "no text");
  });
  await trial("responses, streamed", async () => {
    const stream = await client.responses.create({ model, input: "What is 3 + 4?", stream: true });
    let text = "", last = null;
    for await (const event of stream) {
      text += event.type === "response.output_text.delta" ? event.delta : "";
      last = event;
    }
    check(last.type === "response.completed" && last.response.output[0].content[0].text === text, last);
  });
  await trial("responses: a tool, whole and streamed", async () => {
    const wish = { model, input, tools: [{ type: "function", strict: false, ...named }] };
    const answer = await client.responses.create(wish);
    checkCity(answer.output[0].arguments);
    const final = await client.responses.stream(wish).finalResponse();
    checkCity(final.output[0].arguments);
  });
  await trial("a wrong field is a BadRequestError with its name", async () => {
    const error = await client.responses.create({ model, input, wish: 1 }).catch((told) => told);
    check(error instanceof OpenAI.BadRequestError && error.param === "wish", error);
  });
}

async function embeddings() {
  const embedder = new OpenAI({ baseURL: `${process.env.EMBED_URL}/v1`, apiKey: "none", maxRetries: 0 });
  await trial("embeddings of texts and of token ids, in base64 and as numbers", async () => {
    const create = (body) => embedder.embeddings.create({ model, ...body });
    const texts = await create({ input: ["hello", "What is 3 + 4?"] });
    check(texts.data.map((each) => each.index).join() === "0,1", texts);
    const [plain] = (await create({ input: "hello", encoding_format: "float" })).data;
    const first = texts.data[0].embedding;
    check(plain.embedding.every((value, index) => Math.abs(value - first[index]) < 1e-5), plain);
    check((await create({ input: [[5, 6, 7], [8, 9]] })).usage.prompt_tokens === 5, "tokens");
  });
}

async function main() {
  await chats();
  await responses();
  await embeddings();
  console.log(`\n${JSON.stringify({ package: "openai (Node)", version: VERSION, trials })}`);
}

main();
