package pagoda

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pagodav1 "pagoda/clients/go/pagoda/v1"
)

// resumption is a resumable stream over several calls: Generate first, then Resume with the tokens that have arrived.
// Attempts are counted anew each time that the stream goes on.
type resumption struct {
	request    *pagodav1.GenerateRequest // with a request id
	resumes    bool                      // whether the next call is Resume
	attempts   *attempts
	broken     *Error // what broke the stream
	received   []uint32
	hasBegun   bool
	hasPrompt  bool
	numLate    map[uint32]int // by sequence: messages without tokens, which only its end adds
	numLateNow map[uint32]int // those of this call, which has all of them again
	finished   map[uint32]bool
	isComplete bool
}

func newResumption(request *pagodav1.GenerateRequest, attempts *attempts) *resumption {
	if request.GetRequestId() == "" {
		request = proto.Clone(request).(*pagodav1.GenerateRequest)
		request.RequestId = newRequestID()
	}
	return &resumption{
		request: request, attempts: attempts,
		numLate: map[uint32]int{}, numLateNow: map[uint32]int{}, finished: map[uint32]bool{},
	}
}

func (r *resumption) resumeRequest() *pagodav1.ResumeRequest {
	return &pagodav1.ResumeRequest{RequestId: r.request.GetRequestId(), Received: r.received}
}

// takes tells whether an event has anything that has not arrived before, and removes what has.
func (r *resumption) takes(event *pagodav1.GenerateResponse) bool {
	r.hasBegun = true
	isNew := r.isNew(event)
	if isNew {
		r.attempts.renew()
	}
	r.isComplete = event.GetUsage() != nil
	if r.isComplete && !isNew {
		event.Event = nil
	}
	return isNew || r.isComplete
}

func (r *resumption) isNew(event *pagodav1.GenerateResponse) bool {
	switch e := event.GetEvent().(type) {
	case *pagodav1.GenerateResponse_Prompt:
		hadPrompt := r.hasPrompt
		r.hasPrompt = true
		return !hadPrompt
	case *pagodav1.GenerateResponse_Tokens:
		index, count := e.Tokens.GetIndex(), len(e.Tokens.GetTokens())
		if count > 0 {
			for len(r.received) <= int(index) {
				r.received = append(r.received, 0)
			}
			r.received[index] += uint32(count)
			return true
		}
		r.numLateNow[index]++
		if r.numLateNow[index] <= r.numLate[index] {
			return false
		}
		r.numLate[index]++
		return true
	case *pagodav1.GenerateResponse_Finished:
		wasFinished := r.finished[e.Finished.GetIndex()]
		r.finished[e.Finished.GetIndex()] = true
		return !wasFinished
	}
	return true
}

// wait sleeps before the next call. It returns io.EOF if the stream is complete, and an error if there must be no call.
func (r *resumption) wait(ctx context.Context, failure *Error) error {
	if r.isComplete {
		return io.EOF
	}
	if r.resumes && (failure.Code == codes.NotFound || failure.Code == codes.Unimplemented) {
		if r.hasBegun {
			return r.broken
		}
		r.resumes = false // the server does not know of the stream: nothing is lost, it begins
		return nil
	}
	if err := r.attempts.wait(ctx, failure); err != nil {
		return err
	}
	r.broken, r.resumes = failure, true
	r.numLateNow = map[uint32]int{}
	return nil
}

func newRequestID() string {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		panic(err) // the system has no random numbers
	}
	return hex.EncodeToString(id[:])
}
