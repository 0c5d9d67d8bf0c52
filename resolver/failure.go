package resolver

import (
	"errors"

	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
	"github.com/dnsguard/dnsguard/resolver/cache"
	"github.com/dnsguard/dnsguard/resolver/upstream"
)

// failureOf turns the forwarder's error into what clients are told: SERVFAIL,
// which every libc handles at once, with an extended error that names the
// cause.
func failureOf(err error) cache.Failure {
	f := cache.Failure{Rcode: dnswire.RcodeServFail, EDE: dnswire.EDENetworkError, Text: err.Error()}
	if e, ok := errors.AsType[*upstream.Error](err); ok {
		f.EDE, f.Text = e.EDE()
	}
	return f
}

// failureAnswer turns an upstream's error answer into what clients are told.
// REFUSED becomes SERVFAIL: musl takes REFUSED for no answer and waits out its
// timeout. So do those that need an OPT record to be told: they are about what was
// between us and the upstream (BADVERS, BADCOOKIE, TSIG's), and to a client without
// EDNS the lower four bits would be another one, of 19 NXDOMAIN. Others, such as
// NOTIMP, are the upstream's word on the question.
func failureAnswer(ans *upstream.Answer) cache.Failure {
	f := cache.Failure{Rcode: ans.Response.Rcode, EDE: dnswire.EDEOther, Text: "upstream " + ans.Server.String() + " answered " + dns.RcodeToString[int(ans.Response.Rcode)]}
	if f.Rcode == dnswire.RcodeRefused || f.Rcode >= dnswire.RcodeBadVers {
		f.Rcode = dnswire.RcodeServFail
	}
	return f
}
