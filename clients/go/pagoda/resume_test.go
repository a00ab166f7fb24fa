package pagoda

import (
	"context"
	"io"
	"reflect"
	"testing"

	"google.golang.org/grpc/codes"

	pagodav1 "pagoda/clients/go/pagoda/v1"
)

var notFound = &Error{Code: codes.NotFound}

func promptEvent() *pagodav1.GenerateResponse {
	return &pagodav1.GenerateResponse{Event: &pagodav1.GenerateResponse_Prompt{Prompt: &pagodav1.Prompt{}}}
}

func tokensEvent(index uint32, count int, text string) *pagodav1.GenerateResponse {
	tokens := &pagodav1.Tokens{Index: index, Delta: &pagodav1.Tokens_Text{Text: text}}
	for ; count > 0; count-- {
		tokens.Tokens = append(tokens.Tokens, &pagodav1.Token{Id: 7})
	}
	return &pagodav1.GenerateResponse{Event: &pagodav1.GenerateResponse_Tokens{Tokens: tokens}}
}

func endEvent(index uint32) *pagodav1.GenerateResponse {
	finished := &pagodav1.Finished{Index: index, Reason: pagodav1.FinishReason_FINISH_REASON_STOP}
	return &pagodav1.GenerateResponse{Event: &pagodav1.GenerateResponse_Finished{Finished: finished}}
}

func lastEvent(index uint32) *pagodav1.GenerateResponse {
	event := endEvent(index)
	event.Usage = &pagodav1.Usage{PromptTokens: 1}
	return event
}

func resumable(retries int) *resumption {
	attempts, _ := still(retries, 1)
	request := Prompt("x")
	request.Resumable = true
	return newResumption(request, attempts)
}

func takes(t *testing.T, r *resumption, events ...*pagodav1.GenerateResponse) {
	t.Helper()
	for _, event := range events {
		if !r.takes(event) {
			t.Errorf("%v has come before", event)
		}
	}
}

func breaks(t *testing.T, r *resumption, failure *Error) {
	t.Helper()
	if err := r.wait(context.Background(), failure); err != nil {
		t.Errorf("the stream ends: %v", err)
	}
}

func TestTheRequestForTheRestSaysHowMuchHasArrived(t *testing.T) {
	r := resumable(3)
	if r.request.GetRequestId() == "" {
		t.Error("a stream without an id cannot be resumed before its first message")
	}
	takes(t, r, promptEvent(), tokensEvent(2, 3, ""), tokensEvent(0, 1, ""), tokensEvent(2, 2, ""), endEvent(0))
	breaks(t, r, unavailable)
	again := r.resumeRequest()
	if !r.resumes || again.RequestId != r.request.RequestId || !reflect.DeepEqual(again.Received, []uint32{1, 0, 5}) {
		t.Error(again)
	}
}

func TestWhatComesAgainIsTakenOnce(t *testing.T) {
	r := resumable(3)
	takes(t, r, promptEvent(), tokensEvent(0, 2, ""), tokensEvent(0, 0, "the end"), endEvent(0), tokensEvent(1, 1, ""))
	breaks(t, r, unavailable)
	for _, event := range []*pagodav1.GenerateResponse{promptEvent(), tokensEvent(0, 0, "the end"), endEvent(0)} {
		if r.takes(event) {
			t.Errorf("%v comes twice", event)
		}
	}
	takes(t, r, tokensEvent(1, 0, "another end"), endEvent(1))
}

func TestAnEndMayAddSeveralMessagesWithoutTokens(t *testing.T) {
	r := resumable(3)
	takes(t, r, tokensEvent(0, 2, ""), tokensEvent(0, 0, "an end"), tokensEvent(0, 0, "in"))
	for _, known := range []int{2, 3, 3} {
		breaks(t, r, unavailable)
		for at, text := range []string{"an end", "in", "three parts"} {
			if isNew := r.takes(tokensEvent(0, 0, text)); isNew != (at >= known) {
				t.Errorf("%q is taken: %v, though %d of three were known", text, isNew, known)
			}
		}
	}
}

func TestUsageIsTakenEvenWithAnEndThatHasCome(t *testing.T) {
	r := resumable(3)
	last := lastEvent(0)
	takes(t, r, endEvent(0), last)
	if last.GetFinished() != nil || last.GetUsage().GetPromptTokens() != 1 {
		t.Error(last)
	}
}

func TestAStreamThatBreaksAfterItsLastMessageIsComplete(t *testing.T) {
	r := resumable(3)
	takes(t, r, lastEvent(0))
	if err := r.wait(context.Background(), unavailable); err != io.EOF {
		t.Error(err)
	}
}

func TestAStreamThatTheServerDoesNotKnowBeginsAnewIfNothingHadArrived(t *testing.T) {
	r := resumable(3)
	breaks(t, r, unavailable)
	if !r.resumes {
		t.Error("the first message may have been lost on its way")
	}
	breaks(t, r, notFound)
	if r.resumes {
		t.Error("there is nothing to resume")
	}
}

func TestAStreamThatIsNotKeptEndsWithWhatBrokeIt(t *testing.T) {
	r := resumable(3)
	takes(t, r, tokensEvent(0, 1, ""))
	breaks(t, r, unavailable)
	if err := r.wait(context.Background(), notFound); err != error(unavailable) {
		t.Error(err)
	}
}

func TestAttemptsCountAnewWhenTheStreamHasGoneOn(t *testing.T) {
	r := resumable(2)
	for i := 0; i < 5; i++ {
		takes(t, r, tokensEvent(0, 1, ""))
		breaks(t, r, unavailable)
		breaks(t, r, unavailable)
	}
	r.takes(promptEvent())
	breaks(t, r, unavailable)
	r.takes(promptEvent()) // it comes again with each attempt and says nothing new
	breaks(t, r, unavailable)
	if err := r.wait(context.Background(), unavailable); err != error(unavailable) {
		t.Error(err)
	}
}
