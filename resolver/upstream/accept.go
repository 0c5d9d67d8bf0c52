package upstream

import (
	"github.com/miekg/dns"

	"github.com/dnsguard/dnsguard/internal/dnswire"
)

// verdict is what a message from a server is, whatever was asked.
type verdict uint8

const (
	garbage verdict = iota // no well-formed answer
	cut                    // an answer with TC set
	answer
)

// examine reads a message from a server. RDATA and options that dnswire does
// not know are left to miekg/dns.
func examine(msg []byte, r *dnswire.Response) verdict {
	if err := dnswire.ParseResponse(msg, r); err != nil {
		return garbage
	}
	if r.Flags&dnswire.FlagTC != 0 {
		return cut
	}
	if r.Unchecked && new(dns.Msg).Unpack(msg[:r.End]) != nil {
		return garbage
	}
	return answer
}

// asked reports whether the answer is to our question: name (RFC 4343), type
// and class (RFC 5452 section 9.1). An error answer without a question, which
// ParseResponse lets pass only without records, is known by its id alone.
func (x *exchange) asked(msg []byte, r *dnswire.Response) bool {
	return r.NameLen == 0 || dnswire.EqualFold(msg[dnswire.HeaderLen:dnswire.HeaderLen+r.NameLen+4], x.question())
}

// isFailure reports whether another server might know better: an error, or a
// referral from a server that does not recurse.
func isFailure(msg []byte, r *dnswire.Response) bool {
	switch r.Rcode {
	case dnswire.RcodeNXDomain:
		return false
	case dnswire.RcodeNoError:
		_, an, ns, _ := dnswire.Counts(msg)
		return an == 0 && ns > 0 && r.Classify(msg).Kind == dnswire.Referral
	}
	return true
}
