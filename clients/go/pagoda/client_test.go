package pagoda

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pagodav1 "pagoda/clients/go/pagoda/v1"
)

// A fake answers each call as the next behaviour says, and all later calls as the last one says.
type fake struct {
	pagodav1.UnimplementedInferenceServer
	behaviours []func(send func(*pagodav1.GenerateResponse) error) error

	mutex    sync.Mutex
	metadata []metadata.MD
	ended    chan struct{}
}

func (f *fake) Generate(_ *pagodav1.GenerateRequest, stream pagodav1.Inference_GenerateServer) error {
	defer func() { f.ended <- struct{}{} }()
	return f.next(stream.Context())(stream.Send)
}

func (f *fake) Detokenize(ctx context.Context, _ *pagodav1.DetokenizeRequest) (*pagodav1.DetokenizeResponse, error) {
	return &pagodav1.DetokenizeResponse{Text: "text"}, f.next(ctx)(nil)
}

func (f *fake) next(ctx context.Context) func(func(*pagodav1.GenerateResponse) error) error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	received, _ := metadata.FromIncomingContext(ctx)
	f.metadata = append(f.metadata, received)
	return f.behaviours[min(len(f.metadata), len(f.behaviours))-1]
}

func min(a, b int) int {
	if a < b {
		return a
	}
	return b
}

type sender = func(*pagodav1.GenerateResponse) error

func fails(code codes.Code) func(sender) error {
	return func(sender) error { return status.Error(code, "told to fail") }
}

func succeeds(sender) error { return nil }

func sends(events ...*pagodav1.GenerateResponse) func(sender) error {
	return func(send sender) error {
		for _, event := range events {
			if err := send(event); err != nil {
				return err
			}
		}
		return nil
	}
}

// serving runs a fake and dials it at a network's address.
func serving(t *testing.T, network, address string, f *fake, opts ...Option) *Client {
	t.Helper()
	f.ended = make(chan struct{}, 100)
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pagodav1.RegisterInferenceServer(server, f)
	go server.Serve(listener)
	target := listener.Addr().String()
	if network == "unix" {
		target = "unix:" + target
	}
	client, err := Dial(target, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		client.Close()
		server.Stop()
	})
	return client
}

func asError(t *testing.T, err error) *Error {
	t.Helper()
	var failure *Error
	if !errors.As(err, &failure) {
		t.Fatalf("%T is not typed: %v", err, err)
	}
	return failure
}

func TestGenerateCollectsSequencesByIndex(t *testing.T) {
	for network, address := range map[string]string{
		"tcp": "127.0.0.1:0", "unix": filepath.Join(t.TempDir(), "socket"),
	} {
		events := sends(
			promptEvent(), tokensEvent(1, 2, "b"), tokensEvent(0, 1, "a"), endEvent(1), tokensEvent(0, 1, "c"), lastEvent(0),
		)
		client := serving(t, network, address, &fake{behaviours: []func(sender) error{events}})
		answer, err := client.Generate(context.Background(), Message("Hi"))
		if err != nil {
			t.Fatal(err)
		}
		if answer.Text() != "ac" || answer.Sequences[1].Text != "b" || len(answer.Sequences[1].Tokens) != 2 {
			t.Error(answer)
		}
		if answer.Sequences[1].Finished == nil || answer.Usage.GetPromptTokens() != 1 {
			t.Error(answer)
		}
	}
}

func TestAFailedAnswerHasWhatArrived(t *testing.T) {
	broken := func(send sender) error {
		send(tokensEvent(0, 1, "so far"))
		return status.Error(codes.Internal, "a fault")
	}
	client := serving(t, "tcp", "127.0.0.1:0", &fake{behaviours: []func(sender) error{broken}})
	answer, err := client.Generate(context.Background(), Message("Hi"))
	if asError(t, err).Code != codes.Internal || answer.Text() != "so far" {
		t.Error(answer, err)
	}
}

func TestEachAttemptCarriesTokenAndTenant(t *testing.T) {
	server := &fake{behaviours: []func(sender) error{fails(codes.Unavailable), sends(lastEvent(0))}}
	client := serving(t, "tcp", "127.0.0.1:0", server, WithToken("secret"), WithTenant("ann"))
	if _, err := client.Generate(context.Background(), Message("Hi")); err != nil {
		t.Fatal(err)
	}
	if len(server.metadata) != 2 {
		t.Fatal(server.metadata)
	}
	for _, received := range server.metadata {
		if received.Get("authorization")[0] != "Bearer secret" || received.Get("x-pagoda-tenant")[0] != "ann" {
			t.Error(received)
		}
	}
}

func TestCallsWithOneResponseAreTriedAgainAndFailTyped(t *testing.T) {
	server := &fake{behaviours: []func(sender) error{fails(codes.Unavailable), fails(codes.Unavailable), succeeds}}
	client := serving(t, "tcp", "127.0.0.1:0", server)
	response, err := client.Inference.Detokenize(context.Background(), &pagodav1.DetokenizeRequest{})
	if err != nil || response.GetText() != "text" || len(server.metadata) != 3 {
		t.Error(response, err, len(server.metadata))
	}
	server = &fake{behaviours: []func(sender) error{fails(codes.Unavailable)}}
	client = serving(t, "tcp", "127.0.0.1:0", server, WithRetries(1))
	_, err = client.Inference.Detokenize(context.Background(), &pagodav1.DetokenizeRequest{})
	if asError(t, err).Code != codes.Unavailable || len(server.metadata) != 2 {
		t.Error(err, len(server.metadata))
	}
}

func TestRequestsForVectorsAndScoresHaveTheirTexts(t *testing.T) {
	inputs := Texts("a", "b").GetInputs()
	if len(inputs) != 2 || inputs[1].GetText() != "b" {
		t.Error(inputs)
	}
	request := Continuations("x", "a", "b")
	if request.GetPrompt() != "x" || len(request.Continuations) != 2 || request.Continuations[0].GetText() != "a" {
		t.Error(request)
	}
}

func TestClosingAStreamCancelsItsCall(t *testing.T) {
	endless := func(send sender) error {
		for {
			if err := send(tokensEvent(0, 1, "more ")); err != nil {
				return err
			}
		}
	}
	server := &fake{behaviours: []func(sender) error{endless}}
	client := serving(t, "tcp", "127.0.0.1:0", server)
	stream := client.Stream(context.Background(), Message("Hi"))
	if !stream.Next() || stream.Text() != "more " {
		t.Fatal(stream.Err())
	}
	stream.Close()
	select {
	case <-server.ended:
	case <-time.After(10 * time.Second):
		t.Error("the call still runs")
	}
	if stream.Next() || stream.Err() != nil {
		t.Error(stream.Err())
	}
}

func TestAClosedClientFailsTyped(t *testing.T) {
	client := serving(t, "tcp", "127.0.0.1:0", &fake{behaviours: []func(sender) error{succeeds}})
	client.Close()
	_, err := client.Generate(context.Background(), Message("Hi"))
	if asError(t, err).Code != codes.Canceled || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestARequestThatCannotBeSentFailsTyped(t *testing.T) {
	client := serving(t, "tcp", "127.0.0.1:0", &fake{behaviours: []func(sender) error{succeeds}})
	_, err := client.Generate(context.Background(), Message("\xff"))
	if failure := asError(t, err); !strings.Contains(failure.Message, "UTF-8") {
		t.Error(err)
	}
}

func TestAnErrorHasWhatTheDetailsTell(t *testing.T) {
	failure, err := status.New(codes.InvalidArgument, "must be at least 0").WithDetails(
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "sampling.temperature"}}},
		&errdetails.ErrorInfo{Reason: "QUEUE_FULL", Metadata: map[string]string{"queue_depth": "7"}},
	)
	if err != nil {
		t.Fatal(err)
	}
	e := errorFrom(failure.Err())
	queueDepth := e.Metadata["queue_depth"]
	if e.Field != "sampling.temperature" || e.Reason != "QUEUE_FULL" || queueDepth != "7" || e.HasRetryAfter {
		t.Errorf("%+v", e)
	}
	if text := "pagoda: InvalidArgument: must be at least 0 (field sampling.temperature)"; e.Error() != text {
		t.Error(e)
	}
	if status.Code(e) != codes.InvalidArgument || len(status.Convert(e).Details()) != 2 {
		t.Error("the status is lost")
	}
}

func TestATokenThatMetadataCannotCarryIsRefusedWithoutShowingIt(t *testing.T) {
	for _, token := range []string{"sec\nret", "sécret"} {
		_, err := Dial("127.0.0.1:1", WithToken(token))
		if failure := asError(t, err); failure.Field != "token" || strings.Contains(err.Error(), "ret") {
			t.Error(err)
		}
	}
	if _, err := Dial("127.0.0.1:1", WithAuthorities("/does/not/exist")); err == nil {
		t.Error("a missing file is not refused")
	}
}
