"""Quotas of tenants: requests at once, requests a minute, tokens a minute.

A tenant without a quota is not limited here. Routers that share a ledger share every quota.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from ..errors import QuotaExceeded
from .ledger import NUM_NUMBERS, Numbers, OwnLedger, Row, SharedLedger

MINUTE_S = 60.0
RETRY_REQUEST_S = 1.0  # only the tenant knows when one of its own requests ends
_AT, _TAKEN, _RETURNABLE, _FRACTION, _FORGOTTEN = range(NUM_NUMBERS)  # places of a bucket's numbers
_LEAST_FRACTION = 1e-9
_AT_ONCE_S = 1e-6  # waits below it are errors of rounding


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may use over all of its tokens; None: as much as it likes.

    max_requests         requests at once
    requests_per_minute  also as many at once, after a minute without any
    tokens_per_minute    prompts and outputs; also as many at once
    """

    max_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def part(self, hosts: int) -> Quota:
        """What one of several hosts may serve of it: an equal part, but at least 1. All together keep the quota."""

        def of(whole: int | None) -> int | None:
            return whole and max(whole // hosts, 1)

        return Quota(of(self.max_requests), of(self.requests_per_minute), of(self.tokens_per_minute))


@dataclass(frozen=True, slots=True)
class Claim:
    """What was taken from a bucket: the amount divided by the bucket's fraction, and its `forgotten`, at that time."""

    amount: float
    forgotten: float


class Bucket:
    """A token bucket that takes more than is used, and gets the rest back later.

    What was taken leaves the bucket at a steady rate. The rest of a claim that has left by then cannot be given back:
    had it not been taken, that time would have gone unused. So in any interval no more is used than its length times
    the rate, and one bucketful. All live claims together can give back at most what the bucket holds; if the bucket
    holds less than that, each can give back the same fraction of it.
    """

    def __init__(self, numbers: Numbers | None = None) -> None:
        """
        numbers  its state, which other processes may change between two calls: as of when it is; what is taken; of
                 that, what all claims together can give back; the fraction of it of a claim made when that was 1; how
                 often claims were forgotten. All zero at first
        """
        self.size = 0.0
        self.rate = 0.0
        self._numbers: Numbers = [0.0] * NUM_NUMBERS if numbers is None else numbers

    def resize(self, per_minute: float, now: float) -> None:
        self._leak(now)
        self.size, self.rate = per_minute, per_minute / MINUTE_S

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much can be taken if nothing else is; 0 or less: now."""
        self._leak(now)
        return (self._numbers[_TAKEN] + amount - self.size) / self.rate

    def take(self, amount: float, now: float) -> Claim:
        self._leak(now)
        self._numbers[_TAKEN] += amount
        self._numbers[_RETURNABLE] += amount
        return Claim(amount / self._numbers[_FRACTION], self._numbers[_FORGOTTEN])

    def give_back(self, claim: Claim, unused: float, now: float) -> None:
        """End a claim, of which so much was not used."""
        self._leak(now)
        _, taken, all_returnable, fraction, forgotten = self._numbers
        if claim.forgotten == forgotten:
            returnable = min(claim.amount * fraction, all_returnable)
            self._numbers[_RETURNABLE] = all_returnable - returnable
            self._numbers[_TAKEN] = max(taken - min(unused, returnable), all_returnable - returnable)

    def _leak(self, now: float) -> None:
        at, taken, returnable, fraction, _ = self._numbers
        taken -= self.rate * max(0.0, now - at)  # a clock that started anew, with the machine, counts from now
        self._numbers[_AT] = now
        if taken <= 0 or not fraction:
            self._numbers[_TAKEN] = 0.0
            self._forget_claims()
            return
        self._numbers[_TAKEN] = taken
        if returnable > taken:
            self._numbers[_FRACTION] = fraction * taken / returnable
            self._numbers[_RETURNABLE] = taken
            if self._numbers[_FRACTION] < _LEAST_FRACTION:
                self._forget_claims()

    def _forget_claims(self) -> None:
        """Let the claims made so far give nothing back."""
        self._numbers[_RETURNABLE] = 0.0
        self._numbers[_FRACTION] = 1.0
        self._numbers[_FORGOTTEN] += 1


class _Account:
    """A tenant's quota and what it uses."""

    def __init__(self, row: Row) -> None:
        self.quota = Quota()
        self.row = row
        self.requests = Bucket(row.requests)
        self.tokens = Bucket(row.tokens)


class Spending:
    """What one request uses of its tenant's quotas; a context manager that settles it.

    used  tokens used so far, for the caller to set; those that were reserved beyond it are given back
    """

    def __init__(self, quotas: Quotas, account: _Account | None) -> None:
        self.used = 0
        self._quotas = quotas
        self._account = account
        self._reserved = 0
        self._claim: Claim | None = None

    def reserve(self, tokens: int) -> None:
        """Reserve the tokens that the request can use, or likely will. Raises QuotaExceeded."""
        if self._account is not None and self._account.quota.tokens_per_minute is not None:
            self._claim = self._quotas.take_tokens(self._account, tokens)
            self._reserved = tokens

    def extend(self, tokens: int) -> None:
        """Reserve more tokens, even beyond the quota: the tenant's next requests then wait longer."""
        if self._account is not None and self._claim is not None:
            self._quotas.overdraw(self._account, tokens)
            self._reserved += tokens

    def __enter__(self) -> Spending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._account is not None:
            self._quotas.leave(self._account, self._claim, self._reserved - self.used)


class Quotas:
    """All tenants' quotas, and what is used of them.

    ledger  where it is counted
    clock   the same for all that share the ledger
    """

    def __init__(
        self, ledger: OwnLedger | SharedLedger | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger = ledger or OwnLedger()
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def replace(self, quotas: Mapping[str, Quota]) -> None:
        """Set every tenant's quota. What was used before still counts. A quota that is not given ends."""
        accounts, now = {}, self._clock()
        with self._ledger.locked():
            for tenant, quota in quotas.items():
                account = accounts[tenant] = self._accounts.get(tenant) or _Account(self._ledger.row(tenant))
                account.quota = quota
                account.requests.resize(quota.requests_per_minute or 0, now)
                account.tokens.resize(quota.tokens_per_minute or 0, now)
        self._accounts = accounts

    def refusal(self, tenant: str) -> QuotaExceeded | None:
        """Why a tenant's request of whatever size would be refused now; None if it may be admitted."""
        account = self._accounts.get(tenant)
        if account is None:
            return None
        with self._ledger.locked():
            return self._refusal(account)

    def enter(self, tenant: str) -> Spending:
        """Admit a tenant's request. Raises what `refusal` returns."""
        account = self._accounts.get(tenant)
        if account is not None:
            with self._ledger.locked():
                if (error := self._refusal(account)) is not None:
                    raise error
                account.row.add(1)
                if account.quota.requests_per_minute is not None:
                    self._overdraw(account.requests, 1)
        return Spending(self, account)

    def take_tokens(self, account: _Account, tokens: int) -> Claim:
        """Raises QuotaExceeded."""
        bucket, limit = account.tokens, account.quota.tokens_per_minute
        assert limit is not None
        if tokens > bucket.size:
            why = f"the request may use {tokens} tokens, more than fit at once; a smaller max_tokens needs fewer"
            raise QuotaExceeded("tokens_per_minute", limit, why)
        with self._ledger.locked():
            now = self._clock()
            if (wait_s := bucket.wait_s(tokens, now)) > _AT_ONCE_S:
                raise QuotaExceeded("tokens_per_minute", limit, f"the request may use {tokens} tokens", wait_s)
            return bucket.take(tokens, now)

    def overdraw(self, account: _Account, tokens: int) -> None:
        """Take tokens whether or not the bucket holds them. They are not given back."""
        with self._ledger.locked():
            self._overdraw(account.tokens, tokens)

    def _overdraw(self, bucket: Bucket, amount: float) -> None:
        now = self._clock()
        bucket.give_back(bucket.take(amount, now), 0, now)

    def leave(self, account: _Account, claim: Claim | None, unused: int) -> None:
        with self._ledger.locked():
            account.row.add(-1)
            if claim is not None:
                account.tokens.give_back(claim, unused, self._clock())

    def _refusal(self, account: _Account) -> QuotaExceeded | None:
        quota = account.quota
        if quota.max_requests is not None and account.row.live >= quota.max_requests:
            account.row.forget_dead()
            if (live := account.row.live) >= quota.max_requests:
                return QuotaExceeded("max_requests", quota.max_requests, f"{live} requests run", RETRY_REQUEST_S)
        for name, limit, bucket in (
            ("requests_per_minute", quota.requests_per_minute, account.requests),
            ("tokens_per_minute", quota.tokens_per_minute, account.tokens),
        ):
            if limit is not None and (wait_s := bucket.wait_s(1, self._clock())) > _AT_ONCE_S:
                return QuotaExceeded(name, limit, "it is used up", wait_s)
        return None
