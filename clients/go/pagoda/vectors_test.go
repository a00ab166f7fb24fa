package pagoda_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"pagoda/clients/go/pagoda"
	pagodav1 "pagoda/clients/go/pagoda/v1"
)

// vector is a call that every client's tests make: tests/vectors/README.md explains the fields.
type vector struct {
	Name        string
	Server      string
	Call        string
	Request     json.RawMessage
	Retries     int
	TimeoutS    float64 `json:"timeout_s"`
	Token       *string
	Beside      json.RawMessage
	CancelAfter int `json:"cancel_after"`
	Faults      []json.RawMessage
	Expect      expected
}

type expected struct {
	Code          *codes.Code
	Field         string
	Reason        string
	QueueDepth    *int  `json:"queue_depth"`
	HasRetryDelay *bool `json:"has_retry_delay"`
	Messages      *int
	WithinS       float64  `json:"within_s"`
	RequestID     string   `json:"request_id"`
	PromptIDs     []uint32 `json:"prompt_ids"`
	Sequences     []struct {
		Tokens       []uint32
		Text         string
		FinishReason string `json:"finish_reason"`
		StopString   string `json:"stop_string"`
		StopTokenID  uint32 `json:"stop_token_id"`
		Grammar      bool
	}
	Logprobs []struct {
		Logprob float32
		Top     [][2]float32
	}
	TokenBytes []string `json:"token_bytes"`
	Usage      *struct {
		PromptTokens     uint32  `json:"prompt_tokens"`
		CompletionTokens uint32  `json:"completion_tokens"`
		CachedTokens     *uint32 `json:"cached_tokens"`
	}
	NotBeforeS float64  `json:"not_before_s"`
	IsIdle     bool     `json:"is_idle"`
	TokenIDs   []uint32 `json:"token_ids"`
	Text       *string
	Vectors    [][]float32
	Scores     []score
}

type score struct {
	Logprob  float64
	Tokens   []uint32
	Logprobs []float32
}

type server struct{ Address, Token, CA string }

func TestVectors(t *testing.T) {
	file, servers := os.Getenv("PAGODA_VECTORS"), map[string]server{}
	if file == "" {
		t.Skip("needs the servers of tests/vectors: tests/counterparts/test_go.py")
	}
	if err := json.Unmarshal([]byte(os.Getenv("PAGODA_SERVERS")), &servers); err != nil {
		t.Fatal(err)
	}
	vectors, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer vectors.Close()
	var all struct {
		About   string
		Vectors []vector
	}
	decoder := json.NewDecoder(vectors)
	decoder.DisallowUnknownFields() // an expectation that this test does not know would not be checked
	if err := decoder.Decode(&all); err != nil {
		t.Fatal(err)
	}
	for _, v := range all.Vectors {
		v := v
		t.Run(v.Name, func(t *testing.T) { v.check(t, servers) })
	}
}

// outcome is what came of a call.
type outcome struct {
	events  []*pagodav1.GenerateResponse
	ids     []uint32
	text    string
	vectors [][]float32
	scores  []score
	failure *pagoda.Error
	took    time.Duration
}

func (v vector) check(t *testing.T, servers map[string]server) {
	to := servers["plain"]
	if v.Server != "" {
		to = servers[v.Server]
	}
	client := v.dial(t, to, v.Retries)
	if v.Beside != nil {
		beside := v.dial(t, to, 3).Stream(context.Background(), generateRequest(t, v.Beside))
		for i := 0; i < 3; i++ {
			if !beside.Next() {
				t.Fatal(beside.Err())
			}
		}
		defer beside.Close()
	}
	got := v.ask(t, client)
	want := v.Expect
	if want.WithinS > 0 && got.took.Seconds() > want.WithinS || got.took.Seconds() < want.NotBeforeS {
		t.Errorf("took %v", got.took)
	}
	switch {
	case want.Code != nil:
		want.checkFailure(t, got)
	case got.failure != nil:
		t.Error(got.failure)
	case want.IsIdle:
		checkIdle(t, v.dial(t, servers["plain"], 0))
	case v.Call == "Tokenize":
		equal(t, "token ids", fmt.Sprint(got.ids), fmt.Sprint(want.TokenIDs)) // nil is no id, too
	case v.Call == "Detokenize":
		equal(t, "text", got.text, *want.Text)
	case v.Call == "Embed":
		equal(t, "vectors", got.vectors, want.Vectors)
	case v.Call == "Score":
		equal(t, "scores", got.scores, want.Scores)
	default:
		want.checkAnswer(t, got.events)
	}
}

func (v vector) dial(t *testing.T, to server, retries int) *pagoda.Client {
	t.Helper()
	token := to.Token
	if v.Token != nil {
		token = *v.Token
	}
	options := []pagoda.Option{pagoda.WithRetries(retries), pagoda.WithToken(token)}
	if to.CA != "" {
		options = append(options, pagoda.WithAuthorities(to.CA))
	}
	client, err := pagoda.Dial(to.Address, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

func (v vector) ask(t *testing.T, client *pagoda.Client) (got outcome) {
	ctx, cancel := context.WithCancel(context.Background())
	if v.TimeoutS > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(v.TimeoutS*float64(time.Second)))
	}
	defer cancel()
	var err error
	started := time.Now()
	switch v.Call {
	case "Tokenize":
		var response *pagodav1.TokenizeResponse
		request := &pagodav1.TokenizeRequest{}
		read(t, v.Request, request)
		response, err = client.Inference.Tokenize(ctx, request)
		got.ids = response.GetTokenIds()
	case "Detokenize":
		var response *pagodav1.DetokenizeResponse
		request := &pagodav1.DetokenizeRequest{}
		read(t, v.Request, request)
		response, err = client.Inference.Detokenize(ctx, request)
		got.text = response.GetText()
	case "Embed":
		request := &pagodav1.EmbedRequest{}
		read(t, v.Request, request)
		got.vectors, err = client.Embed(ctx, request)
	case "Score":
		var scores []*pagodav1.ContinuationScore
		request := &pagodav1.ScoreRequest{}
		read(t, v.Request, request)
		scores, err = client.Score(ctx, request)
		for _, each := range scores {
			got.scores = append(got.scores, scoreOf(each))
		}
	default:
		request := generateRequest(t, v.Request)
		if v.Faults != nil {
			request.RequestId += fmt.Sprintf("/go-%d", started.UnixNano())
		}
		stream := client.Stream(ctx, request)
		for stream.Next() {
			got.events = append(got.events, stream.Event())
			if len(got.events) == v.CancelAfter {
				stream.Close()
			}
		}
		err = stream.Err()
	}
	got.took = time.Since(started)
	if err != nil && !errors.As(err, &got.failure) {
		t.Fatalf("%T is not typed: %v", err, err)
	}
	return got
}

func scoreOf(sent *pagodav1.ContinuationScore) score {
	logprobs := []float32{}
	for _, token := range sent.GetTokens() {
		logprobs = append(logprobs, token.GetLogprob())
	}
	return score{Logprob: sent.GetLogprob(), Tokens: idsOf(sent.GetTokens()), Logprobs: logprobs}
}

func generateRequest(t *testing.T, text json.RawMessage) *pagodav1.GenerateRequest {
	request := &pagodav1.GenerateRequest{}
	read(t, text, request)
	return request
}

func read(t *testing.T, text json.RawMessage, request proto.Message) {
	t.Helper()
	if err := protojson.Unmarshal(text, request); err != nil {
		t.Fatal(err)
	}
}

func (want expected) checkFailure(t *testing.T, got outcome) {
	failure := got.failure
	if failure == nil {
		t.Fatalf("did not fail, but sent %v", got.events)
	}
	equal(t, "code", failure.Code, *want.Code)
	equal(t, "field", failure.Field, want.Field)
	if want.Reason != "" {
		equal(t, "reason", failure.Reason, want.Reason)
	}
	if want.QueueDepth != nil {
		equal(t, "queue depth", failure.Metadata["queue_depth"], fmt.Sprint(*want.QueueDepth))
	}
	if want.HasRetryDelay != nil {
		equal(t, "retry delay", failure.HasRetryAfter, *want.HasRetryDelay)
	}
	if want.Messages != nil {
		equal(t, "messages", len(got.events), *want.Messages)
	}
}

func (want expected) checkAnswer(t *testing.T, events []*pagodav1.GenerateResponse) {
	if len(events) == 0 {
		t.Fatal("no message came")
	}
	prompts, finished := [][]uint32{}, map[uint32]*pagodav1.Finished{}
	tokens, texts := map[uint32][]*pagodav1.Token{}, map[uint32]string{}
	for at, event := range events {
		if want.RequestID != "" {
			equal(t, "request id", event.GetRequestId(), want.RequestID)
		}
		equal(t, "whether usage comes", event.GetUsage() != nil, at == len(events)-1)
		switch e := event.GetEvent().(type) {
		case *pagodav1.GenerateResponse_Prompt:
			equal(t, "place of the prompt", at, 0)
			prompts = append(prompts, idsOf(e.Prompt.GetTokens()))
		case *pagodav1.GenerateResponse_Tokens:
			index := e.Tokens.GetIndex()
			tokens[index] = append(tokens[index], e.Tokens.GetTokens()...)
			texts[index] += e.Tokens.GetText()
		case *pagodav1.GenerateResponse_Finished:
			if finished[e.Finished.GetIndex()] != nil {
				t.Errorf("sequence %d finished twice", e.Finished.GetIndex())
			}
			finished[e.Finished.GetIndex()] = e.Finished
		}
	}
	if want.PromptIDs != nil {
		equal(t, "prompt", prompts, [][]uint32{want.PromptIDs})
	}
	equal(t, "sequences", len(finished), len(want.Sequences))
	for i, sequence := range want.Sequences {
		end := finished[uint32(i)]
		equal(t, "ids", idsOf(tokens[uint32(i)]), sequence.Tokens)
		equal(t, "text", texts[uint32(i)], sequence.Text)
		equal(t, "end", end.GetReason().String(), "FINISH_REASON_"+strings.ToUpper(sequence.FinishReason))
		equal(t, "stop string", end.GetStopString(), sequence.StopString)
		equal(t, "stop token", end.GetStopTokenId(), sequence.StopTokenID)
		equal(t, "grammar", end.GetGrammar(), sequence.Grammar)
	}
	for i, each := range want.Logprobs {
		token := tokens[0][i]
		equal(t, "logprob", token.GetLogprob(), each.Logprob)
		top := [][2]float32{}
		for _, other := range token.GetTop() {
			top = append(top, [2]float32{float32(other.GetId()), other.GetLogprob()})
		}
		equal(t, "most likely", fmt.Sprint(top), fmt.Sprint(each.Top))
	}
	for i, bytes := range want.TokenBytes {
		equal(t, "bytes", base64.StdEncoding.EncodeToString(tokens[0][i].GetBytes()), bytes)
	}
	if want.Usage != nil {
		usage := events[len(events)-1].GetUsage()
		equal(t, "prompt tokens", usage.GetPromptTokens(), want.Usage.PromptTokens)
		equal(t, "completion tokens", usage.GetCompletionTokens(), want.Usage.CompletionTokens)
		if want.Usage.CachedTokens != nil {
			equal(t, "cached tokens", usage.GetCachedTokens(), *want.Usage.CachedTokens)
		}
	}
}

// checkIdle waits until no sequence runs and no block is in use.
func checkIdle(t *testing.T, client *pagoda.Client) {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		load, err := client.Control.GetLoad(context.Background(), &pagodav1.GetLoadRequest{})
		if err != nil {
			t.Fatal(err)
		}
		isIdle := len(load.GetEngines()) > 0
		for _, engine := range load.GetEngines() {
			isIdle = isIdle && engine.GetRunning() == 0 && engine.GetBlocksReferenced() == 0
		}
		if isIdle {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the server is not idle: %v", load)
		}
	}
}

func idsOf(tokens []*pagodav1.Token) []uint32 {
	ids := []uint32{}
	for _, token := range tokens {
		ids = append(ids, token.GetId())
	}
	return ids
}

func equal(t *testing.T, what string, got, want interface{}) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %v, not %v", what, got, want)
	}
}
