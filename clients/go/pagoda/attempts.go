package pagoda

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	firstBackoff   = 100 * time.Millisecond
	maxBackoff     = 2 * time.Second
	maxSuggested   = 30 * time.Second
	suggestedExtra = 0.25 // of a suggested delay
)

// attempts counts the attempts of one call.
//
// A call is tried again if the server was unavailable, after an exponential backoff with jitter, or if the server
// suggested a delay, after that delay and up to a quarter more. A call is not tried again if the wait would outlast its
// deadline, or if the server suggests more than 30 s.
type attempts struct {
	retries, left int
	backoff       time.Duration
	jitter        func() float64
	sleep         func(context.Context, time.Duration) error
}

func newAttempts(retries int) *attempts {
	return &attempts{retries: retries, left: retries, backoff: firstBackoff, jitter: jitter, sleep: sleep}
}

// renew counts retries from zero: the last attempt was of use.
func (a *attempts) renew() {
	a.left, a.backoff = a.retries, firstBackoff
}

// wait sleeps before the next attempt. It returns an error if there must be none.
func (a *attempts) wait(ctx context.Context, failure *Error) error {
	delay, retry := a.delayAfter(failure)
	if !retry || a.left <= 0 {
		return failure
	}
	if deadline, ok := ctx.Deadline(); ok && delay >= time.Until(deadline) {
		return failure
	}
	a.left--
	if err := a.sleep(ctx, delay); err != nil {
		return errorFrom(status.FromContextError(err).Err())
	}
	return nil
}

func (a *attempts) delayAfter(failure *Error) (delay time.Duration, retry bool) {
	switch {
	case failure.Code != codes.Unavailable && failure.Code != codes.ResourceExhausted:
		return 0, false
	case failure.HasRetryAfter:
		// The server tells all that it refuses at once the same delay: they must not come back at once.
		spread := 1 + suggestedExtra*a.jitter()
		return time.Duration(spread * float64(failure.RetryAfter)), failure.RetryAfter <= maxSuggested
	case failure.Code == codes.Unavailable:
		delay = time.Duration((0.5 + 0.5*a.jitter()) * float64(a.backoff))
		if a.backoff *= 2; a.backoff > maxBackoff {
			a.backoff = maxBackoff
		}
		return delay, true
	}
	return 0, false
}

// jitter is a random number from 0 to 1. It is not from math/rand, which draws the same numbers in every process before
// Go 1.20.
func jitter() float64 {
	var bytes [8]byte
	if _, err := rand.Read(bytes[:]); err != nil {
		return 0.5
	}
	return float64(binary.LittleEndian.Uint64(bytes[:])>>11) / (1 << 53)
}

func sleep(ctx context.Context, delay time.Duration) error {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
