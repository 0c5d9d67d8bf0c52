package kube

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
)

// ear hears, below client-go, what comes from the API server for one watch: the
// only place where each bookmark is seen and no failure is kept from us.
// (A reflector that is refused a connection tries again without a word; a
// request that has timed out looks to it like a watch that has ended well.)
type ear struct {
	feeds *feeds
	watch *watchState
}

type earKey struct{}

// with marks the requests made with the context it returns.
func (e *ear) with(ctx context.Context) context.Context { return context.WithValue(ctx, earKey{}, e) }

// listener is the transport that the ears listen at.
type listener struct{ http.RoundTripper }

func listenTo(rt http.RoundTripper) http.RoundTripper { return listener{rt} }

// WrappedRoundTripper is for those who look for the transport below.
func (l listener) WrappedRoundTripper() http.RoundTripper { return l.RoundTripper }

// RoundTrip implements [http.RoundTripper].
func (l listener) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := l.RoundTripper.RoundTrip(req)
	e, _ := req.Context().Value(earKey{}).(*ear)
	switch {
	case e == nil:
	case err != nil:
		if !errors.Is(err, context.Canceled) {
			e.feeds.fail(e.watch, steady(err))
		}
	case resp.StatusCode == http.StatusOK:
		e.answered()
		resp.Body = &heardBody{resp.Body, e}
	}
	return resp, err
}

// answered notes that the server does what it was asked to. What it sends has
// yet to be understood if nothing ever was.
func (e *ear) answered() {
	e.feeds.update(func() {
		if e.watch.synced {
			e.watch.arrived()
		}
	})
}

// heardBody is a response in which each read is a sign of life.
type heardBody struct {
	io.ReadCloser
	ear *ear
}

// Read implements [io.Reader].
func (b *heardBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.ear.feeds.contact(b.ear.watch)
	}
	return n, err
}

// steady is err in words that stay the same from one attempt to the next:
// without our own port.
func steady(err error) error {
	var op *net.OpError
	if errors.As(err, &op) && op.Source != nil {
		without := *op
		without.Source = nil
		return &without
	}
	return err
}

// isTransport tells whether err says that there was no answer.
func isTransport(err error) bool {
	var u *url.Error
	return errors.As(err, &u)
}
