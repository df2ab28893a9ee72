// The same shop in JavaScript, with the AWS SDK, against `penstock serve --clock auto`:
//
//     PENSTOCK=http://127.0.0.1:9324 node --test examples/testing/shop.test.mjs
//
// Each seed has an account of its own on the server, so that tests can run side by side.
import assert from "node:assert/strict";
import test from "node:test";
import { SQSClient, CreateQueueCommand, DeleteMessageCommand, ReceiveMessageCommand, SendMessageCommand } from "@aws-sdk/client-sqs";

const endpoint = process.env.PENSTOCK ?? "http://127.0.0.1:9324";
const seeds = Number(process.env.SEEDS ?? 50);

// The control interface: the clock, faults by seed, and what happened to each message.
const control = async (page, body) => {
  const answer = await fetch(`${endpoint}/_penstock/${page}`, body && {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  const found = await answer.json();
  if (!answer.ok) throw new Error(`${found.error}\n${(found.story ?? []).join("\n")}`);
  return found;
};

// Receives until the queue is empty; an error of a queue is met by trying again.
async function consume(sqs, QueueUrl, handle, isEmpty) {
  while (!(await isEmpty())) {
    try {
      const { Messages = [] } = await sqs.send(new ReceiveMessageCommand({ QueueUrl, WaitTimeSeconds: 20 }));
      for (const message of Messages) {
        handle(JSON.parse(message.Body));
        await sqs.send(new DeleteMessageCommand({ QueueUrl, ReceiptHandle: message.ReceiptHandle }));
      }
    } catch (error) {
      if (!error.$metadata) throw error;
    }
  }
}

const shops = {
  hasty: () => (order, charges) => charges.push(order.id),
  careful: () => {
    const done = new Set();
    return (order, charges) => done.has(order.id) || (done.add(order.id), charges.push(order.id));
  },
};

for (const [name, make] of Object.entries(shops)) {
  test(`the ${name} shop charges every order once`, async () => {
    for (let seed = 0; seed < seeds; seed += 1) {
      const account = String(700_000_000_000 + seed);
      const sqs = new SQSClient({
        endpoint, region: "us-east-1", maxAttempts: 1, credentials: { accessKeyId: account, secretAccessKey: "any" },
      });
      const { QueueUrl } = await sqs.send(new CreateQueueCommand({ QueueName: "orders" }));
      for (const id of [1, 2, 3]) {
        await sqs.send(new SendMessageCommand({ QueueUrl, MessageBody: JSON.stringify({ id }) }));
      }
      await control("chaos", { account, seed, max: 25 });
      const charges = [];
      const shop = make();
      const isEmpty = async () =>
        (await fetch(`${endpoint}/_penstock/await`, {
          method: "POST", headers: { "Content-Type": "application/json" },
          body: JSON.stringify({ account, queue: "orders", until: "empty", timeout: 0 }),
        })).ok;
      await consume(sqs, QueueUrl, (order) => shop(order, charges), isEmpty);
      const { faults } = await control(`chaos?account=${account}`);
      const { stories } = await control(`stories?account=${account}`);
      assert.deepEqual((await control(`audit?account=${account}`)).broken, []);
      await control("reset", { account });
      sqs.destroy();
      assert.deepEqual(
        charges.sort(), [1, 2, 3],
        `seed ${seed}: ${charges}\n${faults.map((each) => each.text).join("\n")}\n${stories.orders.join("\n")}`,
      );
    }
  });
}
