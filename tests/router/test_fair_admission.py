"""Tenants share the router's limits: thresholds, evictions, and exact accounts."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda_server.router.errors import ResourceExhausted
from pagoda_server.router.request.admission import Admission, Reservation
from pagoda_server.router.request.shares import GREED, Shares

HUGE = 1 << 40


def fair(max_requests: int, max_tokens: int = HUGE, weights: dict[str, float] | None = None) -> Admission:
    admission = Admission(max_requests, max_tokens)
    admission.share(weights or {})
    return admission


def fill(admission: Admission, tenant: str, running: int = 0, most: int = 1 << 30) -> list[Reservation]:
    """As many requests of a tenant as are admitted, up to `most`. The first `running` have started."""
    admitted: list[Reservation] = []
    while len(admitted) < most and admission.refusal(tenant) is None:
        admitted.append(admission.reserve(tenant))
        if len(admitted) <= running:
            admitted[-1].starts()
    return admitted


def num_left(reservations: list[Reservation]) -> int:
    return sum(each.eviction is None for each in reservations)


@pytest.mark.parametrize("most", [1, 2, 17, 64, 1024])
def test_a_tenant_alone_gets_nearly_all_places_and_the_next_one_finds_one(most: int) -> None:
    admission = fair(most)
    held = fill(admission, "a", running=most)
    assert len(held) >= max(1, most * GREED // (GREED + 1))
    if most > 1:
        assert admission.refusal("b") is None
        admission.reserve("b")
    assert num_left(held) == len(held), "what is being computed goes on"


def test_a_refusal_for_the_sake_of_other_tenants_says_so() -> None:
    admission = fair(64)
    fill(admission, "a", running=64)
    with pytest.raises(
        ResourceExhausted, match="60 requests are admitted, 60 of them for this tenant; what is left is"
    ):
        admission.reserve("a")


def test_tenants_that_want_everything_hold_what_their_weights_give_them() -> None:
    admission = fair(1000, weights={"double": 2.0})
    held = {name: fill(admission, name) for name in ("a", "double", "b")}
    for name in held:
        held[name] += fill(admission, name)
    counts = {name: num_left(reservations) for name, reservations in held.items()}
    assert counts["a"] == pytest.approx(250, abs=15)
    assert counts["b"] == pytest.approx(250, abs=15)
    assert counts["double"] == pytest.approx(500, abs=30)


def test_the_newest_request_that_waits_gives_way_and_those_that_run_stay() -> None:
    admission = fair(64)
    held = fill(admission, "a", running=8)
    fill(admission, "b")
    evicted = [each for each in held if each.eviction is not None]
    assert evicted == held[-len(evicted) :]
    assert len(held) - len(evicted) == pytest.approx(32, abs=2)
    error = evicted[0].eviction
    assert isinstance(error, ResourceExhausted)
    assert error.details[0].reason == "EVICTED"  # type: ignore[attr-defined]
    assert (error.retry_after_s, error.queue_depth is not None) == (1.0, True)


def test_tenants_with_equal_shares_do_not_evict_each_other_in_turns() -> None:
    admission = fair(64)
    held = fill(admission, "a") + fill(admission, "b")
    before = num_left(held)
    for _ in range(100):
        for tenant in ("a", "b"):
            held += fill(admission, tenant, most=3)
    assert len(held) - num_left(held) < 40
    assert num_left(held) == before


def test_the_tenant_that_gives_way_is_the_one_furthest_above_its_share() -> None:
    admission = fair(120, weights={"heavy": 4.0})
    of_heavy = fill(admission, "heavy", most=70)
    of_light = fill(admission, "light", most=50)
    newcomers = fill(admission, "new", most=10)
    assert (len(newcomers), num_left(of_heavy)) == (10, 70)
    assert num_left(of_light) < 50, "50 of weight 1 are more than 70 of weight 4"


def test_a_request_that_outgrew_its_tokens_weighs_more_and_stays() -> None:
    admission = fair(9, max_tokens=100)
    running, waiting = admission.reserve("a"), admission.reserve("a")
    running.grow(10)
    running.starts()
    waiting.grow(20)
    other = admission.reserve("b")
    other.grow(30)
    running.extend(30)
    newcomer = admission.reserve("c")
    newcomer.grow(20)
    assert waiting.eviction is not None, "its tenant is the heaviest by now"
    assert running.eviction is other.eviction is None


def test_tokens_are_shared_too_and_several_requests_may_give_way_to_one() -> None:
    admission = fair(1000, max_tokens=1000)
    held = [admission.reserve("a") for _ in range(9)]
    for each in held:
        each.grow(100)
    held[0].starts()
    large = admission.reserve("b")
    large.grow(100)
    large.grow(250)
    assert [each.eviction is None for each in held] == [True] * 6 + [False] * 3
    assert (admission.requests, admission.tokens) == (7, 950)
    with pytest.raises(ResourceExhausted, match="no room for 200 more"):
        large.grow(200)
    assert num_left(held) == 6, "none gives way in vain"
    assert (admission.requests, admission.tokens) == (7, 950)
    with pytest.raises(ResourceExhausted):
        admission.reserve("b").grow(600)
    assert num_left(held) == 6


def test_requests_that_hold_no_tokens_yet_do_not_give_way_for_tokens() -> None:
    admission = fair(1000, max_tokens=1000)
    reading = [admission.reserve("a") for _ in range(100)]
    admission.reserve("a").grow(900)
    with_tokens = admission.reserve("b")
    with_tokens.grow(200)
    assert num_left(reading) == 100
    assert admission.tokens == 200


def test_a_tenant_that_has_ended_most_of_its_work_still_gives_way_with_the_rest() -> None:
    shares: Shares[str] = Shares(100)
    shares.share({})
    shares.add("a", "large", 90)
    shares.add("a", "small", 9)
    shares.add("b", "tiny", 1)
    assert shares.displaced_by("new", 1) == "small"
    shares.remove("a", "large", 90)
    assert shares.displaced_by("new", 1) == "small"
    assert shares.displaced_by("new", 9) is None


def test_only_a_fair_policy_evicts_and_the_policy_may_change() -> None:
    admission = Admission(64, HUGE)
    held = fill(admission, "a")
    assert len(held) == 64
    assert admission.refusal("b") is not None
    admission.share({})
    assert admission.refusal("b") is None
    admission.share(None)
    assert admission.refusal("b") is not None
    assert num_left(held) == 64


def test_names_of_tenants_that_hold_nothing_are_forgotten() -> None:
    shares: Shares[object] = Shares(10)
    shares.share({})
    kept = object()
    shares.add("kept", kept, 1)
    for number in range(10_000):
        holder = object()
        shares.add(f"tenant {number}", holder, 1)
        shares.remove(f"tenant {number}", holder, 1)
    assert len(shares._tenants) == 1
    assert len(shares._heap) < 100
    assert shares.displaced_by("new", 1) is None, "one place each"


# -- the task of an evicted request -------------------------------------------------------------------------------


async def test_an_evicted_task_ends_with_the_refusal_from_wherever_it_waits() -> None:
    admission = fair(2)
    cleaned = asyncio.Event()

    async def handle() -> None:
        with admission.reserve("a"):
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.set()

    tasks = [asyncio.create_task(handle())]
    await asyncio.sleep(0)
    admission.share({"b": 100.0})
    admission._places.most = 1
    with admission.reserve("b"):
        with pytest.raises(ResourceExhausted, match="a tenant that holds less"):
            await tasks[0]
        assert cleaned.is_set()
        assert not tasks[0].cancelled()
        assert admission.requests == 1
    assert admission.requests == 0


async def test_a_client_that_leaves_while_its_request_is_evicted_is_cancelled() -> None:
    admission = fair(1)

    async def handle() -> None:
        with admission.reserve("a") as reservation:
            held.append(reservation)
            await asyncio.sleep(60)

    held: list[Reservation] = []
    task = asyncio.create_task(handle())
    await asyncio.sleep(0)
    held[0].evict(ResourceExhausted("evicted"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- every order of operations ------------------------------------------------------------------------------------

tenants = st.sampled_from(["light", "heavy", *"abcd"])
WEIGHTS = {"heavy": 3.0, "light": 0.5}


class AdmissionMachine(RuleBasedStateMachine):
    """Requests of several tenants come, grow, start and end in any order."""

    max_requests = 12
    max_tokens = 100

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(self.max_requests, self.max_tokens)
        self.admission.share(WEIGHTS)
        self.live: list[Reservation] = []
        self.started: set[Reservation] = set()

    def of(self, tenant: str) -> list[Reservation]:
        return [each for each in self.live if each.tenant == tenant]

    def load(self, tenant: str, extra: int = 0) -> float:
        return (len(self.of(tenant)) + extra) / WEIGHTS.get(tenant, 1.0)

    def drop_evicted(self) -> list[Reservation]:
        evicted = [each for each in self.live if each.eviction is not None]
        self.live = [each for each in self.live if each.eviction is None]
        assert not self.started & set(evicted), "what has started goes on"
        return evicted

    @rule(tenant=tenants)
    def come(self, tenant: str) -> None:
        total, held = len(self.live), len(self.of(tenant))
        active = {each.tenant for each in self.live} | {tenant}
        share = self.max_requests * WEIGHTS.get(tenant, 1.0) / sum(WEIGHTS.get(name, 1.0) for name in active)
        free = self.max_requests - total - 1
        fits = free >= 0 and (held == 0 or held + 1 <= GREED * WEIGHTS.get(tenant, 1.0) * free)
        waiting = [each for each in self.live if each not in self.started]
        heaviest = max((self.load(each.tenant) for each in waiting), default=0.0)
        newest = {each.tenant: each for each in waiting if self.load(each.tenant) == heaviest}.values()
        has_tokens = self.admission._tokens.has_room(tenant, 1) or self.admission._tokens.displaced_by(tenant, 1)
        foreseen = self.admission.refusal(tenant)
        assert (foreseen is None) == bool(has_tokens and (fits or self.load(tenant, 1) < heaviest))
        fair_load = self.max_requests / sum(WEIGHTS.get(name, 1.0) for name in active)
        if held + 1 <= share and has_tokens and any(self.load(each.tenant) > fair_load for each in waiting):
            assert foreseen is None, "a tenant below its share is admitted while one above its share waits"
        if foreseen is not None:
            with pytest.raises(ResourceExhausted):
                self.admission.reserve(tenant)
            assert not self.drop_evicted()
            return
        reservation = self.admission.reserve(tenant)
        evicted = self.drop_evicted()
        assert len(evicted) == (0 if fits else 1)
        for each in evicted:
            assert each in newest, "the newest that waits, of a tenant that holds the most for its weight"
        self.live.append(reservation)

    @precondition(lambda self: any(each not in self.started for each in self.live))
    @rule(data=st.data(), tokens=st.integers(1, 60))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        one = data.draw(st.sampled_from([each for each in self.live if each not in self.started]))
        before = [(each, each.tokens) for each in self.live]
        try:
            one.grow(tokens)
        except ResourceExhausted:
            assert [(each, each.tokens) for each in self.live] == before
            assert not self.drop_evicted(), "none is evicted in vain"
            return
        evicted = self.drop_evicted()
        assert one not in evicted
        assert all(each.tenant != one.tenant and each.tokens for each in evicted)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        one.starts()
        self.started.add(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        self.admission.give_back(one)
        self.live.remove(one)
        self.started.discard(one)

    @invariant()
    def the_accounts_are_exact_and_within_the_limits(self) -> None:
        admission = self.admission
        assert admission.requests == len(self.live) <= self.max_requests
        tokens = [each.tokens for each in self.live if each.tokens]
        assert admission.tokens == sum(tokens)
        assert admission.tokens <= self.max_tokens or len(tokens) == 1
        for shares in (admission._places, admission._tokens):
            assert len(shares._tenants) <= len({each.tenant for each in self.live})
        for tenant in {each.tenant for each in self.live}:
            assert admission._places.held_by(tenant) == len(self.of(tenant))
            assert admission._tokens.held_by(tenant) == sum(each.tokens for each in self.of(tenant))

    def teardown(self) -> None:
        for each in self.live:
            self.admission.give_back(each)
        assert (self.admission.requests, self.admission.tokens) == (0, 0)
        assert not self.admission._places._tenants
        assert not self.admission._tokens._tenants
        assert not self.admission._running


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
