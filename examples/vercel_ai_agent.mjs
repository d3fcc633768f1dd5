// The Vercel AI SDK on Node: an agent with a tool, and a streamed answer.

import { openai } from "@ai-sdk/openai"; // it reads OPENAI_BASE_URL and OPENAI_API_KEY
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const PRICES = { apple: 32, cherry: 5, grape: 29, melon: 41, pear: 26 };
const model = openai.chat(process.env.MODEL);
const lookup = tool({
  description: "Look up the price of an item.",
  inputSchema: z.object({ item: z.string() }),
  execute: async ({ item }) => PRICES[item] ?? "unknown",
});

const prompt = process.argv[2];
const { text, steps } = await generateText({
  model,
  prompt,
  tools: { lookup },
  stopWhen: stepCountIs(4),
  maxOutputTokens: 64,
});
console.log(steps.length, text);

for await (const part of streamText({ model, prompt, maxOutputTokens: 32 }).textStream) {
  process.stdout.write(part);
}
console.log();
