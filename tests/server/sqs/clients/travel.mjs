// The AWS SDK for JavaScript, v3, on a clock that is moved: a timeout of twelve hours takes none.
import * as sqs from "@aws-sdk/client-sqs";

const endpoint = process.argv[2];
const client = new sqs.SQSClient({
  endpoint, region: "us-east-1", credentials: { accessKeyId: "111122223333", secretAccessKey: "any" },
});
const ask = (name, input) => client.send(new sqs[`${name}Command`](input));
const control = async (page, body) => {
  const answer = await fetch(`${endpoint}/_penstock/${page}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ account: "111122223333", ...body }),
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
};

const { QueueUrl } = await ask("CreateQueue", { QueueName: "js", Attributes: { VisibilityTimeout: "43200" } });
await ask("SendMessage", { QueueUrl, MessageBody: "later", DelaySeconds: 900 });
await control("clock", { advance: "15m" });
const first = await ask("ReceiveMessage", { QueueUrl });
const hidden = await ask("ReceiveMessage", { QueueUrl });
await control("clock", { advance: "12h" });
const again = await ask("ReceiveMessage", { QueueUrl });
const { messages } = await control("await", { queue: "js", match: "later" });
console.log(JSON.stringify({
  first: first.Messages[0].Body,
  hidden: (hidden.Messages ?? []).length,
  again: again.Messages[0].Body,
  delivered: messages[0].deliveries,
}));
