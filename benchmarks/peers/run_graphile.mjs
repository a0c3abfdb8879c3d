// Graphile Worker drains a backlog. Runs in the folder of its packages; prints its figures as one line of JSON.
import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";

const task = JSON.parse(process.argv[2]);
const events = task.options.events;
const pool = new pg.Pool({ connectionString: task.url, max: 10 });
const asItComes = task.options.variant === "as it comes";
const quiet = new Logger(() => () => {});

const utils = await makeWorkerUtils({ pgPool: pool, logger: quiet });
await utils.migrate();
await pool.query(
  `SELECT graphile_worker.add_job('deposited', '{"model_id": "1", "amount": 1, "currency": "EUR"}'::json)
   FROM generate_series(1, $1)`,
  [events],
);
if (!asItComes) await pool.query("VACUUM ANALYZE graphile_worker._private_jobs");
await pool.query("CHECKPOINT");

let handled = 0;
let allHandled;
const done = new Promise((resolve) => (allHandled = resolve));
const deposited = async () => {
  if (++handled === events) allHandled();
};

const before = process.cpuUsage();
const begun = performance.now();
const runner = await run({
  pgPool: pool,
  ...(asItComes ? {} : { logger: quiet }),
  noHandleSignals: true,
  concurrency: 24,
  taskList: { deposited },
  preset: { worker: { localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } },
});
await done;
while ((await pool.query("SELECT EXISTS (SELECT FROM graphile_worker._private_jobs) AS more")).rows[0].more) {
  await new Promise((resolve) => setTimeout(resolve, 1));
}
const seconds = (performance.now() - begun) / 1000;
const cpu = process.cpuUsage(before);
await runner.stop();
await utils.release();
await pool.end();
console.log(
  JSON.stringify({ units: events, seconds, rate: events / seconds, cpu_us: (cpu.user + cpu.system) / events }),
);
