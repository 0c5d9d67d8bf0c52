package config

import (
	"net/netip"
	"time"
)

// keys returns the key table, bound to c. It is all that is known about a key
// by itself; what keys demand of each other is in check.go.
func keys(c *Config) mapping {
	return mapping{
		{
			name: "listen", value: list[netip.AddrPort]{at: &c.Listen, element: address},
			meaning: "Addresses that pods query, UDP and TCP; port 53 if left out. With `intercept.mode: none` each must exist on this machine; with `cluster-ip` there may be none.",
		},
		{
			name: "control", value: text(&c.Control, parseSocketPath, "the absolute path of a Unix socket, at most 107 bytes"),
			meaning: "The socket through which the other commands talk to the running daemon.",
		},
		{
			name: "http", value: text(&c.HTTP, parseHTTP, `[IP]:port, or "" for no HTTP server`),
			meaning: "Where `/metrics`, `/healthz`, `/readyz` and `/statusz` are served.",
		},
		{
			name: "clusterDomain", value: subdomain(&c.ClusterDomain),
			meaning: "The cluster's DNS domain.",
		},
		{name: "kubernetes", value: kubernetesKeys(&c.Kubernetes), meaning: "Where the cluster's objects come from."},
		{name: "intercept", value: interceptKeys(&c.Intercept), meaning: "How queries reach dnsguard that pods send elsewhere, so that nothing on the cluster needs changing."},
		{
			name: "upstreams", value: list[Upstream]{
				at:      &c.Upstreams,
				element: func(u *Upstream) value { return upstreamKeys(u) },
				fresh:   Upstream{Zones: []string{"."}, Protocol: ProtocolAuto},
				inline:  true,
			},
			meaning: "Who answers what the cache does not know. The longest zone that holds a name wins. Where no entry names the root zone `.`, the default entry for it is kept.",
		},
		{name: "timeouts", value: timeoutKeys(&c.Timeouts), meaning: "When a query that is not in the cache is helped along: hedge < retry < stale < total."},
		{
			name: "budget", value: mapping{
				{name: "hedge", value: number(&c.Budget.Hedge, 0, 100), meaning: "Second questions sent early, at most so many per cent of the recent queries to an upstream."},
				{name: "retry", value: number(&c.Budget.Retry, 0, 100), meaning: "Questions sent again, likewise."},
			},
			meaning: "What dnsguard may add to an upstream's load.",
		},
		{
			name: "cache", value: mapping{
				{name: "size", value: size(&c.Cache.Size, Mi, 64*Gi), meaning: "Memory for cached answers, all zones together."},
				{
					name: "zones", value: zoneCaps{&c.Cache.Zones},
					meaning: "Caps on how long answers are kept. The longest zone that holds a name wins. Zones are laid over the default ones; a cap that is left out is that of the enclosing zone. The short default caps are those of `clusterDomain`.",
				},
				{name: "prefetch", value: boolean(&c.Cache.Prefetch), meaning: "Ask again for names in use before they expire."},
			},
			meaning: "What is kept of the answers, and for how long.",
		},
		{name: "search", value: searchKeys(&c.Search), meaning: "Finishing a pod's search-list walk in one step."},
		{
			name: "aaaa", value: enum(&c.AAAA, AAAAPass, AAAANoData),
			meaning: "Questions for IPv6 addresses: `pass` treats them like all others, `nodata` answers that there is none.",
		},
		{name: "guard", value: guardKeys(&c.Guard), meaning: "Removing UDP flows that lead to DNS pods which no longer serve."},
		{name: "limits", value: limitKeys(&c.Limits), meaning: "Bounds on the work at hand. The limits per client apply only when the total is under pressure."},
		{
			name: "log", value: mapping{
				{name: "level", value: logLevel(&c.Log.Level), meaning: "The least severe records that are written."},
				{name: "format", value: enum(&c.Log.Format, LogAuto, LogJSON, LogText), meaning: "`auto` is `text` on a terminal and `json` elsewhere."},
			},
			meaning: "The log, on standard error.",
		},
	}
}

func kubernetesKeys(k *Kubernetes) mapping {
	return mapping{
		{
			name: "source", value: enum(&k.Source, SourceAPI, SourceFile, SourceNone),
			meaning: "`api`: the API server; `file`: `kubernetes.file`; `none`: there is no cluster, hence no guard and no Service to forward to.",
		},
		{
			name: "file", value: text(&k.File, parsePath, `the path of a file, or ""`),
			meaning: "With `source: file`: Service, EndpointSlice, Pod and Namespace objects as YAML documents, watched for change.",
		},
		{
			name: "kubeconfig", value: text(&k.Kubeconfig, parsePath, `the path of a file, or ""`),
			meaning: "With `source: api`: how to reach the API server; empty means in-cluster.",
		},
		{
			name: "nodeName", value: text(&k.NodeName, parseNodeName, `a node's name, or ""`),
			meaning: "The node whose Pods are watched; empty means `$NODE_NAME`.",
		},
		{
			name: "dnsService", value: serviceName(&k.DNSService),
			meaning: "The cluster's DNS Service: what `service` stands for in `upstreams`, and whose ClusterIPs `intercept.mode: cluster-ip` takes.",
		},
	}
}

func interceptKeys(i *Intercept) mapping {
	return mapping{
		{
			name: "mode", value: enum(&i.Mode, InterceptNone, InterceptLinkLocal, InterceptClusterIP),
			meaning: "`none`: only the addresses of this machine in `listen`; `link-local`: the addresses in `listen`, which are on no interface; `cluster-ip`: those and the ClusterIPs of `kubernetes.dnsService`.",
		},
		{
			name: "backend", value: enum(&i.Backend, BackendAuto, BackendNFTables, BackendIPTables),
			meaning: "By what the rules are set; `auto` is nftables where the kernel has it.",
		},
		{
			name: "mark", value: mark(&i.Mark),
			meaning: "Two bits of the packet mark that nobody else on the node uses: the lower for packets taken, the higher for dnsguard's own upstream queries. (Calico uses 0xffff0000, Cilium 0xf00.)",
		},
		{
			name: "table", value: scalar[uint32]{
				at: &i.Table, tags: []string{tagNumber}, parse: parseTable, format: formatNumber[uint32],
				want: "a whole number from 1 to 4294967295 except 253, 254 and 255",
			},
			meaning: "The routing table that leads the packets taken to this machine.",
		},
		{
			name: "rulePriority", value: number(&i.RulePriority, 1, 32765),
			meaning: "The priority of the routing rule for it. A foreign rule that sorts earlier may win.",
		},
		{
			name: "zone", value: number(&i.Zone, 1, 65535),
			meaning: "The connection-tracking zone in which the link-local address goes on working while no dnsguard runs.",
		},
		{
			name: "aliveTimeout", value: duration(&i.AliveTimeout, 500*time.Millisecond, 30*time.Second),
			meaning: "The dead-man's switch: a dnsguard that has answered nothing for so long is let past by the kernel.",
		},
		{
			name: "exclude", value: list[netip.Prefix]{at: &i.Exclude, element: prefix},
			meaning: "Clients that are never intercepted. Also: the annotation `dnsguard.io/intercept: \"false\"` on pods and namespaces.",
		},
	}
}

func upstreamKeys(u *Upstream) mapping {
	return mapping{
		{name: "zones", value: list[string]{at: &u.Zones, element: domain, needs: true}, meaning: "The zones it answers for."},
		{
			name: "servers", value: list[Server]{at: &u.Servers, element: server, needs: true}, required: true,
			meaning: "`service`: the ClusterIP of `kubernetes.dnsService`, by the same way as any pod's query; an absolute path: the nameservers of that file (form of resolv.conf), watched for change; IP[:port]: that server.",
		},
		{name: "protocol", value: enum(&u.Protocol, ProtocolAuto, ProtocolUDP, ProtocolTCP), meaning: "`auto`: UDP, and TCP where an answer was truncated."},
	}
}

func timeoutKeys(t *Timeouts) mapping {
	return mapping{
		{name: "hedge", value: hedge(&t.Hedge), meaning: "When a second question is sent beside the first; `auto` follows the upstream's measured round-trip time."},
		{name: "retry", value: timeout(&t.Retry), meaning: "When a question without an answer is sent again."},
		{name: "stale", value: timeout(&t.Stale), meaning: "When an expired answer is given rather than none (RFC 8767)."},
		{name: "total", value: timeout(&t.Total), meaning: "When the client gets an error rather than no answer."},
	}
}

func zoneKeys(z *CacheZone) mapping {
	const enclosing = "the enclosing zone's"
	return mapping{
		{name: "positive", value: duration(&z.Positive, 0, maxPositive), otherwise: enclosing, meaning: "Answers with data, at most so long."},
		{name: "negative", value: duration(&z.Negative, 0, maxNegative), otherwise: enclosing, meaning: "NXDOMAIN and NODATA, at most so long."},
		{name: "stale", value: duration(&z.Stale, 0, maxStale), otherwise: enclosing, meaning: "How long after its expiry an answer may still be given when no upstream answers; 0s is never."},
	}
}

func searchKeys(s *Search) mapping {
	return mapping{
		{name: "collapse", value: boolean(&s.Collapse), meaning: "Where the client walks its search list: answer the first question with the walk's result."},
		{name: "expand", value: boolean(&s.Expand), meaning: "Where the client does not: walk its list for a short name that does not exist. Also per namespace: the annotation `dnsguard.io/expand: \"true\"`."},
		{name: "ndots", value: number(&s.NDots, 0, 15), meaning: "Names with fewer dots are walked, unless the pod says otherwise."},
		{name: "domains", value: list[string]{at: &s.Domains, element: subdomain}, meaning: "The node's own search domains, which follow the cluster's three: those of the `search` line that kubelet appends to every pod's list, in its order. A pod's list lacks what is left out: a name below such a domain is still found, by the client's own next steps, but one that exists as it is, too, is found as it is, where the pod's libc would find the first. A warning tells where the node has domains that are not here."},
		{name: "types", value: list[RRType]{at: &s.Types, element: rrType, needs: true}, meaning: "The types of questions that are walked."},
	}
}

func guardKeys(g *Guard) mapping {
	return mapping{
		{name: "enabled", value: boolean(&g.Enabled), meaning: "Whether the guard runs."},
		{
			name: "services", value: list[ServiceName]{at: &g.Services, element: serviceName}, otherwise: "the Service of `kubernetes.dnsService`",
			meaning: "The Services whose flows are guarded. A list names `kubernetes.dnsService` as well, if that is to be guarded.",
		},
		{name: "dryRun", value: boolean(&g.DryRun), meaning: "Count and log the flows that would be removed, and leave them."},
		{name: "evidence", value: boolean(&g.Evidence), meaning: "Also move the flows of an endpoint that is Ready and does not answer."},
		{name: "resync", value: duration(&g.Resync, time.Second, 10*time.Minute), meaning: "How often the table is compared when nothing has changed."},
	}
}

func limitKeys(l *Limits) mapping {
	return mapping{
		{name: "inFlight", value: number(&l.InFlight, 1, 1_000_000), meaning: "Questions that wait for an upstream."},
		{name: "inFlightPerClient", value: number(&l.InFlightPerClient, 1, 1_000_000), meaning: "The same, per client address."},
		{name: "tcpConnections", value: number(&l.TCPConnections, 1, 1_000_000), meaning: "Open TCP connections of clients."},
		{name: "tcpConnectionsPerClient", value: number(&l.TCPConnectionsPerClient, 1, 1_000_000), meaning: "The same, per client address."},
		{name: "readers", value: number(&l.Readers, 0, 64), meaning: "UDP sockets per address, each with its reader; 0 is min(GOMAXPROCS, 4)."},
	}
}
