"""Quotas of tenants: requests at once, requests a minute, tokens a minute.

A tenant without a quota is not limited here. Several routers each hold their part of every quota.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from ..errors import QuotaExceeded

MINUTE_S = 60.0
RETRY_REQUEST_S = 1.0  # only the tenant knows when one of its own requests ends
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


@dataclass(frozen=True, slots=True)
class Claim:
    """What was taken from a bucket: the amount divided by the bucket's fraction, and its `forgotten`, at that time."""

    amount: float
    forgotten: int


class Bucket:
    """A token bucket that takes more than is used, and gets the rest back later.

    What was taken leaves the bucket at a steady rate. The rest of a claim that has left by then cannot be given back:
    had it not been taken, that time would have gone unused. So in any interval no more is used than its length times
    the rate, and one bucketful. All live claims together can give back at most what the bucket holds; if the bucket
    holds less than that, each can give back the same fraction of it.
    """

    def __init__(self, now: float) -> None:
        self.size = 0.0
        self.rate = 0.0
        self._at = now
        self._taken = 0.0
        self._returnable = 0.0  # of all claims
        self._fraction = 1.0  # of a claim made when it was 1
        self._forgotten = 0  # how often claims were forgotten

    def resize(self, per_minute: float, now: float) -> None:
        self._leak(now)
        self.size, self.rate = per_minute, per_minute / MINUTE_S

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much can be taken if nothing else is; 0 or less: now."""
        self._leak(now)
        return (self._taken + amount - self.size) / self.rate

    def take(self, amount: float, now: float) -> Claim:
        self._leak(now)
        self._taken += amount
        self._returnable += amount
        return Claim(amount / self._fraction, self._forgotten)

    def give_back(self, claim: Claim, unused: float, now: float) -> None:
        """End a claim, of which so much was not used."""
        self._leak(now)
        if claim.forgotten == self._forgotten:
            returnable = min(claim.amount * self._fraction, self._returnable)
            self._returnable -= returnable
            self._taken = max(self._taken - min(unused, returnable), self._returnable)

    def _leak(self, now: float) -> None:
        self._taken -= self.rate * (now - self._at)
        self._at = now
        if self._taken <= 0:
            self._taken = 0.0
            self._forget_claims()
        elif self._returnable > self._taken:
            self._fraction *= self._taken / self._returnable
            self._returnable = self._taken
            if self._fraction < _LEAST_FRACTION:
                self._forget_claims()

    def _forget_claims(self) -> None:
        """Let the claims made so far give nothing back."""
        self._returnable = 0.0
        self._fraction = 1.0
        self._forgotten += 1


class _Account:
    """What one tenant uses."""

    def __init__(self, now: float) -> None:
        self.quota = Quota()
        self.live = 0
        self.requests = Bucket(now)
        self.tokens = Bucket(now)


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
    """All tenants' quotas in this router, and what is used of them.

    parts  routers that share the quotas
    """

    def __init__(self, parts: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def replace(self, quotas: Mapping[str, Quota]) -> None:
        """Set every tenant's quota. What was used before still counts. A quota that is not given ends."""
        accounts, now = {}, self._clock()
        for tenant, quota in quotas.items():
            account = accounts[tenant] = self._accounts.get(tenant) or _Account(now)
            account.quota = quota
            account.requests.resize((quota.requests_per_minute or 0) / self._parts, now)
            account.tokens.resize((quota.tokens_per_minute or 0) / self._parts, now)
        self._accounts = accounts

    def refusal(self, tenant: str) -> QuotaExceeded | None:
        """Why a tenant's request of whatever size would be refused now; None if it may be admitted."""
        account = self._accounts.get(tenant)
        return None if account is None else self._refusal(account)

    def enter(self, tenant: str) -> Spending:
        """Admit a tenant's request. Raises what `refusal` returns."""
        account = self._accounts.get(tenant)
        if account is not None:
            if (error := self._refusal(account)) is not None:
                raise error
            account.live += 1
            if account.quota.requests_per_minute is not None:
                now = self._clock()
                account.requests.give_back(account.requests.take(1, now), 0, now)
        return Spending(self, account)

    def take_tokens(self, account: _Account, tokens: int) -> Claim:
        """Raises QuotaExceeded."""
        now, bucket, limit = self._clock(), account.tokens, account.quota.tokens_per_minute
        assert limit is not None
        if tokens > bucket.size:
            why = f"the request may use {tokens} tokens, more than fit at once; a smaller max_tokens needs fewer"
            raise QuotaExceeded("tokens_per_minute", limit, why)
        if (wait_s := bucket.wait_s(tokens, now)) > _AT_ONCE_S:
            raise QuotaExceeded("tokens_per_minute", limit, f"the request may use {tokens} tokens", wait_s)
        return bucket.take(tokens, now)

    def overdraw(self, account: _Account, tokens: int) -> None:
        """Take tokens whether or not the bucket holds them. They are not given back."""
        now = self._clock()
        account.tokens.give_back(account.tokens.take(tokens, now), 0, now)

    def leave(self, account: _Account, claim: Claim | None, unused: int) -> None:
        account.live -= 1
        if claim is not None:
            account.tokens.give_back(claim, unused, self._clock())

    def _refusal(self, account: _Account) -> QuotaExceeded | None:
        quota = account.quota
        if quota.max_requests is not None and account.live >= quota.max_requests // self._parts:
            return QuotaExceeded("max_requests", quota.max_requests, f"{account.live} requests run", RETRY_REQUEST_S)
        for name, limit, bucket in (
            ("requests_per_minute", quota.requests_per_minute, account.requests),
            ("tokens_per_minute", quota.tokens_per_minute, account.tokens),
        ):
            if limit is not None and (wait_s := bucket.wait_s(1, self._clock())) > _AT_ONCE_S:
                return QuotaExceeded(name, limit, "it is used up", wait_s)
        return None
