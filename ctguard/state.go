package ctguard

// State tells whether there is anything for the guard to do on this node.
type State uint8

// The states.
const (
	// Waiting: no snapshot yet, so nothing is judged.
	Waiting State = iota

	// NoService: no watched Service has a UDP frontend.
	NoService

	// Unseen: no flow to a frontend has been seen. The node is quiet, or its
	// Services are translated elsewhere than in netfilter (Cilium's
	// replacement of kube-proxy, Calico's eBPF dataplane).
	Unseen

	// Untouched: there are flows to frontends, but none has ever been
	// translated.
	Untouched

	// IPVS: every frontend is served by IPVS, which remembers the endpoints
	// of flows in a table of its own. Deleting flows would not move them.
	IPVS

	// Guarding: translated flows are there to be guarded.
	Guarding
)

// String is the state's name in metrics, logs and JSON.
func (s State) String() string {
	names := [...]string{
		Waiting: "waiting", NoService: "no-service", Unseen: "unseen",
		Untouched: "untouched", IPVS: "ipvs", Guarding: "guarding",
	}
	if int(s) < len(names) {
		return names[s]
	}
	return "unknown"
}

// MarshalText makes JSON show the name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Idle tells that there is nothing to be guarded as far as is known: Message has
// the reason. The table is looked at all the same, in case that changes.
func (s State) Idle() bool { return s != Waiting && s != Guarding }

// Message is a sentence for an operator.
func (s State) Message() string {
	switch s {
	case Waiting:
		return "the guard waits for Services and EndpointSlices"
	case NoService:
		return "the guard has nothing to do: no watched Service has a UDP port"
	case Unseen:
		return "the guard has seen no flow to a watched Service: this node is quiet, or its Services are not translated by netfilter"
	case Untouched:
		return "the guard has seen no translated flow to a watched Service: nothing is deleted"
	case IPVS:
		return "the guard has nothing to do: IPVS keeps flows in a table of its own (see net.ipv4.vs.expire_nodest_conn)"
	default:
		return "the guard watches the flows to the watched Services"
	}
}

// state derives the state. seen tells whether some flow to a frontend has been
// seen.
func (k *knowledge) state(p *Policy, seen bool) State {
	if p == nil {
		return Waiting
	}
	fs := p.present()
	ipvs := 0
	for _, f := range fs {
		if k.ipvs[f.Addr] {
			ipvs++
		}
	}
	switch {
	case len(fs) == 0:
		return NoService
	case ipvs == len(fs):
		return IPVS
	case len(k.translated) > 0:
		return Guarding
	case seen:
		return Untouched
	default:
		return Unseen
	}
}
