package pagoda

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

var (
	unavailable = &Error{Code: codes.Unavailable}
	overloaded  = &Error{Code: codes.ResourceExhausted}
)

func suggested(code codes.Code, delay time.Duration) *Error {
	return &Error{Code: code, RetryAfter: delay, HasRetryAfter: true}
}

// still makes attempts that do not sleep, and a list of the delays that they would have slept.
func still(retries int, jitter float64) (*attempts, *[]time.Duration) {
	slept := new([]time.Duration)
	return &attempts{
		retries: retries, left: retries, backoff: firstBackoff, jitter: func() float64 { return jitter },
		sleep: func(_ context.Context, delay time.Duration) error {
			*slept = append(*slept, delay)
			return nil
		},
	}, slept
}

func TestBackoffDoublesUpToItsLimitAndIsJittered(t *testing.T) {
	for jitter, factor := range map[float64]time.Duration{0: 1, 1: 2} {
		a, slept := still(7, jitter)
		for i := 0; i < 7; i++ {
			if err := a.wait(context.Background(), unavailable); err != nil {
				t.Fatal(err)
			}
		}
		for i, want := range []time.Duration{50, 100, 200, 400, 800, 1000, 1000} {
			if got := (*slept)[i]; got != factor*want*time.Millisecond {
				t.Errorf("jitter %v: attempt %d after %v", jitter, i, got)
			}
		}
		if err := a.wait(context.Background(), unavailable); err != error(unavailable) {
			t.Errorf("no retries are left, but: %v", err)
		}
	}
}

func TestASuggestedDelayIsSleptWithUpToAQuarterMore(t *testing.T) {
	for _, code := range []codes.Code{codes.Unavailable, codes.ResourceExhausted} {
		a, slept := still(1, 1)
		if err := a.wait(context.Background(), suggested(code, 2*time.Second)); err != nil {
			t.Fatal(err)
		}
		if got := (*slept)[0]; got != 2500*time.Millisecond {
			t.Errorf("%v: %v", code, got)
		}
	}
}

func TestWhatIsNotTriedAgain(t *testing.T) {
	soon, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for name, given := range map[string]struct {
		ctx     context.Context
		failure *Error
	}{
		"overloaded without a delay":     {context.Background(), overloaded},
		"a delay of more than 30 s":      {context.Background(), suggested(codes.Unavailable, 31*time.Second)},
		"a delay beyond the deadline":    {soon, suggested(codes.ResourceExhausted, 2*time.Second)},
		"another status, with a delay":   {context.Background(), suggested(codes.Internal, time.Second)},
		"a status that no attempt heals": {context.Background(), &Error{Code: codes.InvalidArgument}},
	} {
		a, slept := still(3, 0)
		if err := a.wait(given.ctx, given.failure); err != error(given.failure) || len(*slept) > 0 {
			t.Errorf("%s: slept %v, then %v", name, *slept, err)
		}
	}
}

func TestACancelledContextEndsTheWait(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	started := time.Now()
	err := newAttempts(3).wait(ctx, suggested(codes.Unavailable, 20*time.Second))
	if !errors.Is(err, context.Canceled) || time.Since(started) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(started))
	}
}
