// Submit requests over one stream, follow the tokens of one, and read the results of a batch, whatever the queue does
// meanwhile: `npm ci && node client.js [HOST:PORT] [REQUESTS]`. Needs running services: `penstock up`.
'use strict';

const { randomUUID } = require('node:crypto');
const path = require('node:path');
const { setTimeout: sleep } = require('node:timers/promises');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const PROTOS = path.join(__dirname, '..', '..', 'protos');
const SPELLING = { includeDirs: [PROTOS], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const { penstock } = grpc.loadPackageDefinition(loader.loadSync('penstock/queue/v1/queue.proto', SPELLING));

// docs/protocol.md, "Channel settings for other languages", has the reasons.
const CHANNEL = {
  'grpc.max_receive_message_length': 16 * 1024 * 1024,
  'grpc.keepalive_time_ms': 20_000,
  'grpc.keepalive_timeout_ms': 10_000,
  'grpc.keepalive_permit_without_calls': 1,
  'grpc.initial_reconnect_backoff_ms': 50,
  'grpc.max_reconnect_backoff_ms': 2_000,
};
const PAUSE_MS = { first: 50, most: 2_000 };
const FRAME = 160; // requests that are sent together: so many are acknowledged together

class Client {
  constructor(address, key) {
    // With TLS: grpc.credentials.createSsl(roots, key, certificate).
    this.stub = new penstock.queue.v1.QueueService(address, grpc.credentials.createInsecure(), CHANNEL);
    this.metadata = new grpc.Metadata();
    if (key) this.metadata.set('authorization', `Bearer ${key}`);
  }

  close() {
    this.stub.close();
  }

  // Durable names of the requests, in their order. What has no ack when the stream breaks, or is told that there is no
  // room now, is sent again under its key, so that no request is there twice.
  async submit(requests) {
    const [names, refused] = [[], []];
    const unacked = new Map(requests.map((request, index) => [String(index), request]));
    const take = (ack) => {
      if (['SUBMIT_STATUS_UNAVAILABLE', 'SUBMIT_STATUS_OVER_QUOTA'].includes(ack.status)) return;
      unacked.delete(ack.tag);
      if (ack.request_id) names[Number(ack.tag)] = ack.request_id;
      else refused.push(`request ${ack.tag}: ${ack.error.message}`);
    };
    await this.#lasting('submit', {
      open: () => {
        const call = this.stub.Submit(this.metadata);
        call.write({ open: { client_id: 'node-example' } }); // the client speaks first
        return call;
      },
      heard: (frame, call) => {
        if (frame.message === 'acks') return frame.acks.acks.forEach(take);
        const tagged = Array.from(unacked, ([tag, request]) => ({ tag, request }));
        for (let n = 0; n < tagged.length; n += FRAME) call.write({ batch: { requests: tagged.slice(n, n + FRAME) } });
        return call.end(); // the stream ends once all is acked
      },
      done: () => unacked.size === 0,
    });
    if (refused.length) throw new Error(refused.join('\n'));
    return names;
  }

  // The result of one request; `told` is given its text as it comes, and whether it begins anew (another attempt).
  async follow(requestId, told) {
    let [text, shown, tokens, attempt, result] = ['', 0, 0, 0, null];
    const show = (anew) => {
      if (anew && shown) told('', true);
      shown = anew ? 0 : shown;
      if (text.length > shown) told(text.slice(shown), false);
      shown = Math.max(shown, text.length);
    };
    const take = (delta) => {
      const offset = Number(delta.offset);
      // After a reconnect the first has everything from the start. What leaves a gap is left out: the result has it.
      const joins = offset === 0 || (delta.attempt === attempt && offset === tokens);
      if (delta.attempt < attempt || !joins) return;
      text = offset === 0 ? delta.text : text + delta.text;
      tokens = offset + delta.token_ids.length;
      show(delta.attempt > attempt);
      attempt = delta.attempt;
    };
    await this.#lasting('follow', {
      open: () => {
        const call = this.stub.Follow(this.metadata);
        call.write({ follow: [{ request_id: requestId, tokens: true }] });
        call.end(); // names nothing more: the stream ends with the result
        return call;
      },
      heard: (frame) => {
        if (frame.unknown.length) throw new Error(`${requestId} is unknown`);
        for (const event of frame.events) {
          if (event.event === 'tokens') take(event.tokens);
          else if (event.event === 'result') result = event.result.result;
        }
      },
      done: () => result !== null,
    });
    const before = text;
    text = result.choices.map((choice) => choice.text).join('');
    show(!text.startsWith(before));
    return result;
  }

  // Gives `take` each result of a batch once, until nothing of it waits or runs. The cursor outlives the connection.
  async watch(batch, take) {
    let cursor = '0';
    await this.#lasting('watch', {
      open: () => this.stub.Watch({ batch, cursor }, this.metadata),
      heard: (frame) => {
        for (const event of frame.events) {
          if (event.event !== 'result') continue;
          take(event.result.result);
          cursor = event.result.cursor;
        }
      },
      done: () => true,
    });
  }

  // Opens a stream, and again after a pause where it breaks or ends before all is done. Other errors are thrown.
  async #lasting(name, { open, heard, done }) {
    for (let pause = PAUSE_MS.first; ; pause = Math.min(2 * pause, PAUSE_MS.most)) {
      let there = false;
      const error = await new Promise((resolve) => {
        const call = open();
        call.on('error', resolve);
        call.on('end', () => resolve(null)); // behind `error`, if there is one
        call.on('data', (frame) => {
          there = true;
          try {
            heard(frame, call);
          } catch (problem) {
            resolve(problem);
            call.cancel();
          }
        });
      });
      if (error === null && done()) return;
      if (error !== null && error.code !== grpc.status.UNAVAILABLE) throw error;
      if (error !== null && there) pause = PAUSE_MS.first; // it was there until now
      console.error(`${name}: ${error ? error.details : 'there is no room'}; again`);
      await sleep(pause * (0.5 + Math.random() / 2));
    }
  }
}

async function main([address = '127.0.0.1:7410', count = '20']) {
  const client = new Client(address, process.env.PENSTOCK_KEY);
  const batch = `node-${randomUUID()}`;
  const sums = Array.from({ length: Number(count) }, (_, n) => ({
    text: `${n} + ${n} =`, sampling: { max_tokens: 4 },
    batch, channel: 'batch', idempotency_key: `${batch}/${n}`, client_reference: String(n),
  }));
  const length = { min_tokens: 150, max_tokens: 200 };
  const story = { text: 'Once upon a time', sampling: length, idempotency_key: `${batch}/story` };

  const names = await client.submit([story, ...sums]);
  console.log(`submitted ${names.length}; story ${names[0]}`);
  const result = await client.follow(names[0], (text, anew) => process.stdout.write(anew ? '\n(again) ' : text));
  console.log(`\n${result.outcome}`);
  await client.watch(batch, ({ client_reference: reference, outcome, choices }) => {
    console.log(`${reference}\t${outcome}\t${JSON.stringify(choices.map((choice) => choice.text))}`);
  });
  client.close();
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error.message);
  process.exit(1);
});
