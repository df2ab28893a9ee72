// sqs-consumer: polls, calls the handler and deletes; a message whose handler throws is received again.
import * as sqs from "@aws-sdk/client-sqs";
import { Consumer } from "sqs-consumer";

const client = new sqs.SQSClient({
  endpoint: process.argv[2],
  region: "us-east-1",
  credentials: { accessKeyId: "any", secretAccessKey: "any" },
});
const created = await client.send(new sqs.CreateQueueCommand({ QueueName: "consumer" }));
const queueUrl = created.QueueUrl;
for (let n = 0; n < 25; n += 1) {
  await client.send(new sqs.SendMessageCommand({ QueueUrl: queueUrl, MessageBody: `m${n}` }));
}
const done = new Set();
let failures = 0;
const consumer = Consumer.create({
  queueUrl,
  sqs: client,
  batchSize: 10,
  waitTimeSeconds: 5,
  terminateVisibilityTimeout: true,
  handleMessage: async (message) => {
    if (message.Body === "m7" && failures === 0) {
      failures += 1;
      throw new Error("the handler fails once");
    }
    done.add(message.Body);
    return message;
  },
});
consumer.on("error", (error) => { console.error(error); process.exit(1); });
consumer.on("processing_error", () => {});
consumer.on("response_processed", () => {
  if (done.size === 25) {
    consumer.stop();
  }
});
consumer.on("stopped", async () => {
  const shown = await client.send(new sqs.GetQueueAttributesCommand({ QueueUrl: queueUrl, AttributeNames: ["All"] }));
  const { ApproximateNumberOfMessages: left, ApproximateNumberOfMessagesNotVisible: held } = shown.Attributes;
  console.log(JSON.stringify({ done: done.size, failures, left, held }));
  process.exit(0);
});
consumer.start();
