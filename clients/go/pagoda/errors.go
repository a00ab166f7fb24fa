package pagoda

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is the failure of a call, made from its status and its google.rpc details.
//
// errors.As finds it. errors.Is compares it with context.Canceled and context.DeadlineExceeded, and status.FromError
// gives the whole status.
type Error struct {
	// Code is the gRPC status.
	Code codes.Code
	// Message says what is wrong.
	Message string
	// Field is the path of the field that is wrong or not supported, such as `sampling.temperature`.
	Field string
	// Reason says why a call was refused: QUEUE_FULL, QUOTA_EXCEEDED or another constant of the server.
	Reason string
	// Metadata goes with the reason, such as `queue_depth`: the number of requests that the server has admitted.
	Metadata map[string]string
	// RetryAfter is the delay that the server suggests before a retry. It counts if HasRetryAfter is set.
	RetryAfter    time.Duration
	HasRetryAfter bool

	status *status.Status
}

// Error names the status, says what is wrong, and names the field.
func (e *Error) Error() string {
	if e.Field != "" {
		return fmt.Sprintf("pagoda: %s: %s (field %s)", e.Code, e.Message, e.Field)
	}
	return fmt.Sprintf("pagoda: %s: %s", e.Code, e.Message)
}

// Is tells that an error with codes.Canceled is context.Canceled, and likewise for the deadline.
func (e *Error) Is(target error) bool {
	return target == context.Canceled && e.Code == codes.Canceled ||
		target == context.DeadlineExceeded && e.Code == codes.DeadlineExceeded
}

// GRPCStatus is the call's status, with all its details.
func (e *Error) GRPCStatus() *status.Status {
	if e.status == nil {
		return status.New(e.Code, e.Message)
	}
	return e.status
}

func errorFrom(err error) *Error {
	failure := status.Convert(err)
	e := &Error{Code: failure.Code(), Message: failure.Message(), status: failure}
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.BadRequest:
			if violations := detail.GetFieldViolations(); len(violations) > 0 && e.Field == "" {
				e.Field = violations[0].GetField()
			}
		case *errdetails.ErrorInfo:
			e.Reason, e.Metadata = detail.GetReason(), detail.GetMetadata()
		case *errdetails.RetryInfo:
			if delay := detail.GetRetryDelay(); delay != nil {
				e.RetryAfter = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
				e.HasRetryAfter = true
			}
		}
	}
	return e
}
