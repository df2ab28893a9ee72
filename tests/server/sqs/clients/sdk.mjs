// The AWS SDK for JavaScript, v3: it checks the MD5 of every body it sends and receives.
import * as sqs from "@aws-sdk/client-sqs";

const client = new sqs.SQSClient({
  endpoint: process.argv[2],
  region: "us-east-1",
  credentials: { accessKeyId: process.argv[3] ?? "any", secretAccessKey: process.argv[4] ?? "any" },
  maxAttempts: 1,
});
const ask = (name, input) => client.send(new sqs[`${name}Command`](input));
const seen = {};

const { QueueUrl } = await ask("CreateQueue", { QueueName: "js", Attributes: { VisibilityTimeout: "60" } });
const attributes = {
  text: { DataType: "String", StringValue: "ü" },
  bytes: { DataType: "Binary", BinaryValue: new Uint8Array([0, 255]) },
};
const sent = await ask("SendMessage", { QueueUrl, MessageBody: "grüße 😀", MessageAttributes: attributes });
const got = await ask("ReceiveMessage", {
  QueueUrl, WaitTimeSeconds: 5, MessageAttributeNames: ["All"], MessageSystemAttributeNames: ["All"],
});
const [message] = got.Messages;
seen.body = message.Body;
seen.sameId = message.MessageId === sent.MessageId;
seen.sameDigest = message.MD5OfMessageAttributes === sent.MD5OfMessageAttributes;
seen.text = message.MessageAttributes.text.StringValue;
seen.bytes = Array.from(message.MessageAttributes.bytes.BinaryValue);
seen.receives = message.Attributes.ApproximateReceiveCount;
await ask("ChangeMessageVisibility", { QueueUrl, ReceiptHandle: message.ReceiptHandle, VisibilityTimeout: 30 });
await ask("DeleteMessage", { QueueUrl, ReceiptHandle: message.ReceiptHandle });

const Entries = Array.from({ length: 10 }, (_, n) => ({ Id: `e${n}`, MessageBody: `m${n}` }));
seen.batch = (await ask("SendMessageBatch", { QueueUrl, Entries })).Successful.length;
const ten = (await ask("ReceiveMessage", { QueueUrl, MaxNumberOfMessages: 10 })).Messages;
seen.order = ten.map((each) => each.Body).join();
const gone = ten.map((each, n) => ({ Id: `d${n}`, ReceiptHandle: each.ReceiptHandle }));
seen.deleted = (await ask("DeleteMessageBatch", { QueueUrl, Entries: gone })).Successful.length;
seen.empty = (await ask("ReceiveMessage", { QueueUrl })).Messages ?? null;

const fifo = await ask("CreateQueue", { QueueName: "js.fifo", Attributes: { FifoQueue: "true" } });
const first = await ask("SendMessage", {
  QueueUrl: fifo.QueueUrl, MessageBody: "x", MessageGroupId: "g", MessageDeduplicationId: "d",
});
seen.sequence = first.SequenceNumber.length;
try {
  await ask("GetQueueUrl", { QueueName: "none" });
} catch (error) {
  seen.error = [error.name, error instanceof sqs.QueueDoesNotExist, error.$metadata.httpStatusCode];
}
try {
  await ask("ReceiveMessage", { QueueUrl, MaxNumberOfMessages: 11 });
} catch (error) {
  seen.invalid = error.name;
}
seen.attributes = (await ask("GetQueueAttributes", { QueueUrl, AttributeNames: ["VisibilityTimeout"] })).Attributes;
seen.queues = (await ask("ListQueues", { QueueNamePrefix: "js" })).QueueUrls.length;
console.log(JSON.stringify(seen));
