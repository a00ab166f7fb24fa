// Package pagoda is a client of Pagoda, a gRPC streaming inference server for language models.
//
//	client, err := pagoda.Dial("127.0.0.1:50051")
//	if err != nil {
//		log.Fatal(err)
//	}
//	defer client.Close()
//	stream := client.Stream(ctx, pagoda.Message("Why is the sky blue?"))
//	defer stream.Close()
//	for stream.Next() {
//		fmt.Print(stream.Text())
//	}
//	if err := stream.Err(); err != nil {
//		log.Fatal(err)
//	}
//
// Requests and events are the generated messages of package pagodav1, whose comments give meanings and ranges.
package pagoda

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"

	pagodav1 "pagoda/clients/go/pagoda/v1"
)

const maxMessageBytes = 64 << 20

// Client is a connection to a server. It is safe for concurrent use.
//
// Its fields are the services' stubs. Calls through them carry the client's token and tenant, and fail with *Error.
// Those with one response are tried again as Stream does; streams are not.
type Client struct {
	Inference pagodav1.InferenceClient
	Control   pagodav1.ControlClient
	Admin     pagodav1.AdminClient

	connection *grpc.ClientConn
	options    options
}

type options struct {
	token, tenant string
	secret        credentials.TransportCredentials
	retries       int
	dial          []grpc.DialOption
	err           error
}

// Option changes how a Client reaches its server.
type Option func(*options)

// WithToken sends the token as `authorization: Bearer …` with each call.
func WithToken(token string) Option {
	return func(o *options) { o.token = token }
}

// WithTenant names the tenant that the calls are for, as `x-pagoda-tenant`. A server that knows tenants by their tokens
// needs no name, and refuses one that is not the token's unless the token may act for tenants.
func WithTenant(tenant string) Option {
	return func(o *options) { o.tenant = tenant }
}

// WithTLS connects with TLS. A nil config trusts the system's authorities.
func WithTLS(config *tls.Config) Option {
	return func(o *options) { o.secret = credentials.NewTLS(config) }
}

// WithAuthorities connects with TLS and trusts only the authorities in a PEM file.
func WithAuthorities(file string) Option {
	return func(o *options) { o.secret, o.err = credentials.NewClientTLSFromFile(file, "") }
}

// WithRetries sets how many further attempts a call gets that failed before its first message because the server was
// unavailable or overloaded; a resumable stream gets them each time that it breaks. The default is 3.
func WithRetries(retries int) Option {
	return func(o *options) { o.retries = retries }
}

// WithDialOptions adds options of gRPC.
func WithDialOptions(dial ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, dial...) }
}

// Dial makes a client of the server at an address, HOST:PORT or unix:PATH. It does not wait for the connection, and
// fails only if an option is wrong.
func Dial(address string, opts ...Option) (*Client, error) {
	client := &Client{options: options{retries: 3}}
	for _, option := range opts {
		option(&client.options)
	}
	o := client.options
	if o.err != nil {
		return nil, o.err
	}
	for field, value := range map[string]string{"token": o.token, "tenant": o.tenant} {
		if !isPrintable(value) { // the message omits the value, which may be a secret
			message := fmt.Sprintf("%s must be printable ASCII text", field)
			return nil, &Error{Code: codes.InvalidArgument, Message: message, Field: field}
		}
	}
	dial := []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
		// By default a connection waits 1 s after a refused attempt: longer than most retries.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second,
			},
			MinConnectTimeout: 5 * time.Second,
		}),
		// Pings detect a peer that has vanished, even on a quiet stream.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithChainUnaryInterceptor(client.call),
		grpc.WithChainStreamInterceptor(client.stream),
	}
	if o.secret == nil {
		dial = append(dial, grpc.WithInsecure())
	} else {
		dial = append(dial, grpc.WithTransportCredentials(o.secret))
	}
	connection, err := grpc.Dial(address, append(dial, o.dial...)...)
	if err != nil {
		return nil, err
	}
	client.connection = connection
	client.Inference = pagodav1.NewInferenceClient(connection)
	client.Control = pagodav1.NewControlClient(connection)
	client.Admin = pagodav1.NewAdminClient(connection)
	return client, nil
}

// Embed turns each input into a vector of the model's last hidden states.
func (c *Client) Embed(ctx context.Context, request *pagodav1.EmbedRequest) ([][]float32, error) {
	response, err := c.Inference.Embed(ctx, request)
	if err != nil {
		return nil, err
	}
	vectors := [][]float32{}
	for _, embedding := range response.GetEmbeddings() {
		vectors = append(vectors, embedding.GetValues())
	}
	return vectors, nil
}

// Score gives the log-probability of each continuation, and those of its tokens.
func (c *Client) Score(
	ctx context.Context, request *pagodav1.ScoreRequest,
) ([]*pagodav1.ContinuationScore, error) {
	response, err := c.Inference.Score(ctx, request)
	if err != nil {
		return nil, err
	}
	return response.GetScores(), nil
}

// Close cancels running calls and closes the connection. Later calls fail with codes.Canceled.
func (c *Client) Close() error {
	return c.connection.Close()
}

// call gives calls with one response the client's metadata, retries and errors.
func (c *Client) call(
	ctx context.Context, method string, request, response interface{}, connection *grpc.ClientConn,
	invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	attempts := newAttempts(c.options.retries)
	for {
		err := invoke(c.outgoing(ctx), method, request, response, connection, opts...)
		if err == nil {
			return nil
		}
		if err := attempts.wait(ctx, errorFrom(err)); err != nil {
			return err
		}
	}
}

// stream gives streams the client's metadata and errors.
func (c *Client) stream(
	ctx context.Context, desc *grpc.StreamDesc, connection *grpc.ClientConn, method string, begin grpc.Streamer,
	opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	stream, err := begin(c.outgoing(ctx), desc, connection, method, opts...)
	if err != nil {
		return nil, errorFrom(err)
	}
	return typedStream{stream}, nil
}

type typedStream struct{ grpc.ClientStream }

func (s typedStream) SendMsg(message interface{}) error {
	return typed(s.ClientStream.SendMsg(message))
}
func (s typedStream) RecvMsg(message interface{}) error {
	return typed(s.ClientStream.RecvMsg(message))
}

func typed(err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	return errorFrom(err)
}

func (c *Client) outgoing(ctx context.Context) context.Context {
	if c.options.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.options.token)
	}
	if c.options.tenant != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "x-pagoda-tenant", c.options.tenant)
	}
	return ctx
}

func isPrintable(text string) bool {
	for _, char := range text {
		if char < ' ' || char > '~' {
			return false
		}
	}
	return true
}
