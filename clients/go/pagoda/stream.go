package pagoda

import (
	"context"
	"io"

	pagodav1 "pagoda/clients/go/pagoda/v1"
)

// Stream is a call of Generate. It is not safe for concurrent use; cancel its context from elsewhere.
type Stream struct {
	client     *Client
	ctx        context.Context
	cancel     context.CancelFunc
	attempts   *attempts
	request    *pagodav1.GenerateRequest
	resumption *resumption // nil unless the request is resumable
	call       interface {
		Recv() (*pagodav1.GenerateResponse, error)
	}
	event    *pagodav1.GenerateResponse
	hasBegun bool
	isDone   bool
	err      error
}

// Stream begins to generate when Next is first called. The context's deadline is that of all attempts together. Read
// the stream to its end, close it, or cancel the context; all of them free what the call holds in the server.
//
// A call that fails before its first message is tried again if the server was unavailable, or if it suggested a delay
// of at most 30 s, but never beyond the deadline. After the first message, the stream goes on only if the request is
// resumable: it then survives its connection and the server's engine, and gives each token once.
//
// The request must not change while the stream runs.
func (c *Client) Stream(ctx context.Context, request *pagodav1.GenerateRequest) *Stream {
	s := &Stream{client: c, request: request, attempts: newAttempts(c.options.retries)}
	s.ctx, s.cancel = context.WithCancel(ctx)
	if request.GetResumable() {
		s.resumption = newResumption(request, s.attempts)
	}
	return s
}

// Next waits for the next event. It returns false at the stream's end, after which Err tells whether the call failed.
func (s *Stream) Next() bool {
	for !s.isDone {
		event, err := s.receive()
		if err == nil {
			s.hasBegun = true
			if s.resumption == nil || s.resumption.takes(event) {
				s.event = event
				return true
			}
			continue
		}
		s.call = nil
		if err == io.EOF {
			s.end(nil)
		} else if err := s.wait(err.(*Error)); err != nil {
			s.end(err)
		}
	}
	return false
}

// Event is the last event that Next received. The last one of the stream has Usage and Timing.
func (s *Stream) Event() *pagodav1.GenerateResponse {
	return s.event
}

// Text is what the last event adds to the text of the sequence Event().GetTokens().GetIndex(). It is often empty.
func (s *Stream) Text() string {
	return s.event.GetTokens().GetText()
}

// Err is why the stream ended, an *Error. It is nil if the stream is complete, was closed, or has not ended.
func (s *Stream) Err() error {
	return s.err
}

// Close cancels the call if it still runs.
func (s *Stream) Close() {
	s.end(nil)
}

func (s *Stream) receive() (*pagodav1.GenerateResponse, error) {
	if s.call == nil {
		if err := s.begin(); err != nil {
			return nil, err
		}
	}
	return s.call.Recv()
}

func (s *Stream) begin() (err error) {
	switch {
	case s.resumption == nil:
		s.call, err = s.client.Inference.Generate(s.ctx, s.request)
	case s.resumption.resumes:
		s.call, err = s.client.Inference.Resume(s.ctx, s.resumption.resumeRequest())
	default:
		s.call, err = s.client.Inference.Generate(s.ctx, s.resumption.request)
	}
	return err
}

// wait sleeps before the next attempt. It returns an error, or io.EOF for a complete stream, if there must be none.
func (s *Stream) wait(failure *Error) error {
	if s.resumption != nil {
		return s.resumption.wait(s.ctx, failure)
	}
	if s.hasBegun {
		return failure
	}
	return s.attempts.wait(s.ctx, failure)
}

func (s *Stream) end(err error) {
	if s.isDone {
		return
	}
	s.isDone = true
	if err != io.EOF {
		s.err = err
	}
	s.cancel()
}

// Answer is a whole stream.
type Answer struct {
	RequestID string
	// Prompt is what the input became, if Output.Prompt asked for it.
	Prompt []*pagodav1.Token
	// Sequences by index; one unless Sampling.N asked for more.
	Sequences []Sequence
	Usage     *pagodav1.Usage
	Timing    *pagodav1.Timing
}

// Sequence is one generated sequence.
type Sequence struct {
	Text, Reasoning string
	ToolCalls       []*pagodav1.ToolCall
	Tokens          []*pagodav1.Token
	// Finished tells how the sequence ended. It is nil if the call failed before.
	Finished *pagodav1.Finished
}

// Generate collects a Stream. If the call fails, the answer has what arrived before.
func (c *Client) Generate(ctx context.Context, request *pagodav1.GenerateRequest) (*Answer, error) {
	stream := c.Stream(ctx, request)
	defer stream.Close()
	answer := &Answer{}
	for stream.Next() {
		answer.add(stream.Event())
	}
	return answer, stream.Err()
}

// Text is that of the first sequence.
func (a *Answer) Text() string {
	if len(a.Sequences) == 0 {
		return ""
	}
	return a.Sequences[0].Text
}

func (a *Answer) add(event *pagodav1.GenerateResponse) {
	a.RequestID = event.GetRequestId()
	switch e := event.GetEvent().(type) {
	case *pagodav1.GenerateResponse_Prompt:
		a.Prompt = e.Prompt.GetTokens()
	case *pagodav1.GenerateResponse_Tokens:
		sequence := a.sequence(e.Tokens.GetIndex())
		sequence.Text += e.Tokens.GetText()
		sequence.Reasoning += e.Tokens.GetReasoning()
		if part := e.Tokens.GetToolCall(); part != nil {
			sequence.addCall(part)
		}
		sequence.Tokens = append(sequence.Tokens, e.Tokens.GetTokens()...)
	case *pagodav1.GenerateResponse_Finished:
		a.sequence(e.Finished.GetIndex()).Finished = e.Finished
	}
	if event.GetUsage() != nil {
		a.Usage, a.Timing = event.GetUsage(), event.GetTiming()
	}
}

func (a *Answer) sequence(index uint32) *Sequence {
	for len(a.Sequences) <= int(index) {
		a.Sequences = append(a.Sequences, Sequence{})
	}
	return &a.Sequences[index]
}

func (s *Sequence) addCall(part *pagodav1.ToolCallDelta) {
	for len(s.ToolCalls) <= int(part.GetIndex()) {
		s.ToolCalls = append(s.ToolCalls, &pagodav1.ToolCall{})
	}
	call := s.ToolCalls[part.GetIndex()]
	call.Id += part.GetId()
	call.Name += part.GetName()
	call.Arguments += part.GetArguments()
}
