package ctguard

// Verdict is what the policy makes of a flow.
type Verdict uint8

// The verdicts.
const (
	// Foreign flows are not the guard's: other protocols, destinations that
	// are no frontend, conntrack zones that are not watched.
	Foreign Verdict = iota

	// Live flows lead to an endpoint that serves.
	Live

	// Held flows are not in order, yet deleting them now would do harm or no
	// good.
	Held

	// Stale flows are to be deleted.
	Stale
)

// Verdicts are the verdicts that flows to a frontend can get.
func Verdicts() []Verdict { return []Verdict{Live, Held, Stale} }

// String is the verdict's name in metrics, logs and JSON.
func (v Verdict) String() string {
	names := [...]string{Foreign: "foreign", Live: "live", Held: "held", Stale: "stale"}
	if int(v) < len(names) {
		return names[v]
	}
	return "unknown"
}

// MarshalText makes JSON show the name.
func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// Reason says why a flow got its verdict. Each belongs to one verdict.
type Reason uint8

// The reasons, in the order of their verdicts.
const (
	// NotUDP: the guard leaves other protocols alone. A TCP client notices a
	// dead peer by itself.
	NotUDP Reason = iota
	// NoFrontend: the original destination is not one of a watched Service.
	NoFrontend
	// OtherZone: the flow is in a conntrack zone of someone else's.
	OtherZone

	// Serving: the endpoint serves and is there to stay.
	Serving

	// TerminatingBusy: the endpoint terminates and may have a query of this
	// flow in hand, whose reply the deletion would lose.
	TerminatingBusy
	// TerminatingLast: the endpoint terminates, and there is no better one.
	TerminatingLast
	// UntranslatedHeld: the flow was never translated, and no endpoint
	// serves, or no translated flow to this frontend has been seen on this
	// node: then something else may answer here.
	UntranslatedHeld
	// IPVSHeld: IPVS serves the frontend and has a connection table of its
	// own, which would make the entry again.
	IPVSHeld
	// EndpointUnknown: no snapshot has said that the endpoint serves, and it has
	// not been found silent: kube-proxy may know more.
	EndpointUnknown

	// EndpointGone: the endpoint has left the EndpointSlices.
	EndpointGone
	// NotServing: the endpoint is in the EndpointSlices, but does not serve.
	NotServing
	// PortChanged: the endpoint serves under another target port.
	PortChanged
	// NoEndpoints: nothing serves this port.
	NoEndpoints
	// FrontendGone: the Service, or this address or port of it, is gone.
	FrontendGone
	// Untranslated: the flow was made when there was no endpoint, was
	// therefore never translated, and now some endpoint serves.
	Untranslated
	// TerminatingSilent: the endpoint terminates, and has stopped to answer.
	TerminatingSilent
	// TerminatingIdle: the endpoint terminates, and the flow is idle.
	TerminatingIdle
	// Unanswered: the endpoint serves by its EndpointSlice, but has stopped to
	// answer, and queries of this flow wait for answers. Only with evidence.
	Unanswered

	reasons // how many there are
)

// StaleReasons are the reasons for which flows are deleted.
func StaleReasons() []Reason {
	var rs []Reason
	for r := EndpointGone; r < reasons; r++ {
		rs = append(rs, r)
	}
	return rs
}

// Verdict is the verdict to which the reason belongs.
func (r Reason) Verdict() Verdict {
	switch {
	case r <= OtherZone:
		return Foreign
	case r == Serving:
		return Live
	case r <= EndpointUnknown:
		return Held
	default:
		return Stale
	}
}

// String is the reason's name in metrics, logs and JSON.
func (r Reason) String() string {
	names := [...]string{
		NotUDP: "not-udp", NoFrontend: "no-frontend", OtherZone: "other-zone",
		Serving:         "serving",
		TerminatingBusy: "terminating-busy", TerminatingLast: "terminating-last",
		UntranslatedHeld: "untranslated-held", IPVSHeld: "ipvs", EndpointUnknown: "endpoint-unknown",
		EndpointGone: "endpoint-gone", NotServing: "not-serving", PortChanged: "port-changed",
		NoEndpoints: "no-endpoints", FrontendGone: "frontend-gone", Untranslated: "untranslated",
		TerminatingSilent: "terminating-silent", TerminatingIdle: "terminating-idle",
		Unanswered: "unanswered",
	}
	if int(r) < len(names) {
		return names[r]
	}
	return "unknown"
}

// MarshalText makes JSON show the name.
func (r Reason) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// certain tells whether every flow between the same frontend and endpoint
// gets the same verdict whatever its state and however young it is. Only such
// flows may be deleted without looking at each.
func (r Reason) certain() bool {
	switch r {
	case EndpointGone, NotServing, PortChanged, NoEndpoints, FrontendGone, TerminatingSilent:
		return true
	default:
		return false
	}
}
