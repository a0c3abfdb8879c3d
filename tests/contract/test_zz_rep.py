import asyncio
from datetime import timedelta
from outboxio import Outbox, Settings, Event
from outboxio.testing import MovableClock
from tests.app import Emit, Journal, MoneyDeposited, WalletOpened
from tests.spies import watch, Gate, counters
class N(Event):
    n: int
async def test_rollback_of_rename(make_outbox, clock):
    v1, v2, back = [await make_outbox(clock=clock) for _ in range(3)]
    j = Journal()
    v1.handler(MoneyDeposited, name="receipt")(Journal()); await v1.drain()
    v2.handler(MoneyDeposited, name="deposit-receipt", aliases={"receipt"})(Journal()); await v2.drain()
    back.handler(MoneyDeposited, name="receipt")(j)
    clock.advance("1h")
    await back.executor.execute(Emit((1,)))
    await back.drain()
    print("rolled back handler got", j.amounts, await back.admin.counts())
async def test_trigger(postgres_url, make_outbox=None):
    import asyncpg
    async with Outbox(postgres_url, namespace="x", settings=Settings(fanout_poll_delay="30ms", shutdown_timeout="1s")) as o:
        await o.migrate()
        c = await asyncpg.connect(postgres_url)
        await c.execute("ALTER TABLE eventlog.events ADD CHECK (event_type <> 'N')"); await c.close()
        calls = []
        @o.handler(MoneyDeposited, name="emits")
        async def emits(env):
            calls.append(1); env.emit(N(1))
        try:
            async with o.running():
                await o.executor.execute(Emit((1,)))
                await asyncio.sleep(2)
                print("calls", len(calls), await o.admin.counts(), [l.errors for l in o._shards["default"].work.loops])
        except Exception as e: print(type(e), str(e)[:100])
