package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dnsguard/dnsguard/internal/config"
	"github.com/dnsguard/dnsguard/resolver"
)

// explainTimeout bounds an explanation: a walk of ten names, two questions
// each, of an upstream that does not answer.
const explainTimeout = 30 * time.Second

// explainPage is where the control socket explains a look-up.
const explainPage = "/explain"

func explainCommand() command {
	return command{
		name:    "explain",
		summary: "show how a client's look-up of a name goes: each name that is tried, and the answer",
		example: "dnsguard explain api.example.com --namespace shop",
		setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) int {
			qtype := fs.String("type", "A", "type of the records")
			client := fs.String("client", "", "address of the client whose search list counts")
			namespace := fs.String("namespace", "", "namespace of a pod with the ordinary search list")
			format := outputFlag(fs)
			_, load := configFlags(fs)
			return func(ctx context.Context, c *cli, args []string) int {
				if len(args) != 1 {
					fmt.Fprintln(c.err, "dnsguard explain: exactly one name is needed, such as: dnsguard explain api.example.com --namespace shop")
					return exitUsage
				}
				_, _, questionErr := resolver.ParseQuestion(args[0], *qtype)
				addr, err := parseClient(*client, *namespace)
				if err = cmp.Or(questionErr, err); err != nil {
					fmt.Fprintf(c.err, "dnsguard explain: %v\n", err)
					return exitUsage
				}
				cfg, err := load()
				if err != nil {
					return c.fail("explain", err)
				}
				ctx, cancel := context.WithTimeout(ctx, explainTimeout)
				defer cancel()
				x, where, err := explain(ctx, cfg, args[0], *qtype, addr, *namespace)
				if question := (*resolver.QuestionError)(nil); errors.As(err, &question) {
					fmt.Fprintf(c.err, "dnsguard explain: %v\n", question)
					return exitUsage
				}
				if err != nil {
					return c.fail("explain", err)
				}
				if *format == "json" {
					return c.json(x)
				}
				writeExplanation(c.out, x, where)
				return exitOK
			}
		},
	}
}

// parseClient reads --client and --namespace.
func parseClient(client, namespace string) (netip.Addr, error) {
	switch {
	case client != "" && namespace != "":
		return netip.Addr{}, errors.New("--client and --namespace exclude each other: a client's namespace is known by its address")
	case client == "":
		return netip.Addr{}, nil
	}
	addr, err := netip.ParseAddr(client)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("--client: %q is not an IP address", client)
	}
	return addr.Unmap(), nil
}

// explain asks the running daemon, so that its own cache is seen, or, where
// none answers, looks up by itself with the configuration.
func explain(ctx context.Context, cfg *config.Config, name, qtype string, client netip.Addr, namespace string) (x *resolver.Explanation, where string, err error) {
	q := url.Values{"name": {name}, "type": {qtype}, "namespace": {namespace}}
	if client.IsValid() {
		q.Set("client", client.String())
	}
	x = new(resolver.Explanation)
	err = getJSON(ctx, cfg.Control, explainPage+"?"+q.Encode(), x)
	if status := (*statusError)(nil); errors.As(err, &status) && status.status == http.StatusBadRequest {
		return nil, "", &resolver.QuestionError{Problem: status.text}
	}
	if !errors.Is(err, errNoDaemon) {
		return x, "the running daemon", err
	}
	cfg.Listen, cfg.Guard.Enabled, cfg.Intercept.Mode = nil, false, config.InterceptNone // nothing is served
	log, level := newLogger(io.Discard, cfg.Log)
	d, err := newDaemon(ctx, cfg, log, level)
	if err != nil {
		return nil, "", err
	}
	if err = d.awaitService(ctx); err == nil {
		x, err = d.resolver.Explain(ctx, name, qtype, client, namespace)
	}
	return x, "this command (no daemon is running)", errors.Join(err, d.close())
}

// explainHTTP is explain on the daemon's side.
func (d *daemon) explainHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	client, err := parseClient(q.Get("client"), q.Get("namespace"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if d.upstream() == nil {
		// A failure to ask would be remembered.
		http.Error(w, "nobody can be asked yet: "+d.serviceUnknown(d.config()).Error(), http.StatusServiceUnavailable)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), explainTimeout)
	defer cancel()
	x, err := d.resolver.Explain(ctx, q.Get("name"), q.Get("type"), client, q.Get("namespace"))
	if question := (*resolver.QuestionError)(nil); errors.As(err, &question) {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeJSON(w, x)
}

// writeExplanation prints an explanation for a person.
func writeExplanation(out io.Writer, x *resolver.Explanation, where string) {
	fmt.Fprintf(out, "%s %s, as seen by %s\n", x.Name, x.Type, where)
	switch {
	case x.Source == "pod" && len(x.List) == 0:
		fmt.Fprintf(out, "search list: the pod %s has none of its own (host network, not running yet), or libcs differ on what it says; the name is looked up as it is\n", x.Client)
	case x.Source == "none":
		fmt.Fprintln(out, "search list: none is known for this client; the name is looked up as it is")
	default:
		from := map[string]string{"pod": "of the pod " + x.Client, "namespace": "of a ClusterFirst pod of the namespace", "inferred": "read off the name"}[x.Source]
		fmt.Fprintf(out, "search list: %s (ndots %d), %s\n", strings.Join(x.List, " "), x.NDots, from)
	}
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, s := range x.Steps {
		fmt.Fprintf(w, "%s\t", s.Name)
		for _, state := range s.States {
			cached := "asked"
			if state.Cached {
				cached = "cached"
			}
			fmt.Fprintf(w, "%s %s (%s, %d s)\t", state.Type, state.State, cached, state.TTL)
		}
		fmt.Fprintf(w, "%s\n", s.Step)
	}
	_ = w.Flush()
	finished := "the client walks by itself"
	switch {
	case x.Walked:
		finished = "its walk is finished in this one step"
	case len(x.List) == 0:
		finished = "no walk is made"
	}
	fmt.Fprintf(out, "\nasked for %s: %s; %s\n", x.Asked, x.Rcode, finished)
	for _, rr := range x.Answer {
		fmt.Fprintf(out, "    %s\n", rr)
	}
	if x.Error != "" {
		fmt.Fprintf(out, "    extended error %s\n", x.Error)
	}
	for _, note := range x.Notes {
		fmt.Fprintf(out, "note: %s\n", note)
	}
}
