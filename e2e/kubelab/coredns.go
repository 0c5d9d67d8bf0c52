package kubelab

import (
	"context"
	"fmt"
)

// dnsApp is the label that kube-dns selects.
const dnsApp = "kube-dns"

// corefile is kubeadm's, but for the address of the world's server, since pods
// here have no /etc/resolv.conf, and the two addresses where the API is.
const corefile = `.:%d {
    errors
    health {
        lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        kubeconfig /run/kubeconfig
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    prometheus :9153
    forward . %v {
        max_concurrent 1000
    }
    cache 30 {
        disable success cluster.local
        disable denial cluster.local
    }
    loop
    reload
    loadbalance
}
`

// AddCoreDNS adds a pod with CoreDNS, and reports it ready when it is.
func (n *Node) AddCoreDNS(ctx context.Context, name string, port int) (*Pod, error) {
	if err := awaitAPI(ctx, n.Namespace); err != nil {
		return nil, err
	}
	p, err := n.newPod(ctx, "kube-system", name, map[string]string{"k8s-app": dnsApp})
	if err != nil {
		return nil, err
	}
	if err := awaitAPI(ctx, p.Namespace); err != nil {
		return nil, err
	}
	config, err := n.cluster.Kubeconfig(true, "coredns", masters)
	if err != nil {
		return nil, err
	}
	p.program, err = start(p.Namespace, "coredns "+name, n.cluster.components.path("coredns"), []string{"-conf", "/run/Corefile"}, map[string][]byte{
		"kubeconfig": config,
		"Corefile":   fmt.Appendf(nil, corefile, port, worldDNS.Addr()),
	})
	if err != nil {
		return nil, err
	}
	// kubelet's readiness probe.
	err = Await(ctx, name+" is ready", func(ctx context.Context) error {
		if err := p.program.Running(); err != nil {
			return err
		}
		return healthy(ctx, n.Namespace, fmt.Sprintf("http://%v:8181/ready", p.IP4))
	})
	if err != nil {
		return nil, err
	}
	return p, p.Report(ctx, true)
}

// Program returns what runs in the pod, or nil.
func (p *Pod) Program() *Program { return p.program }
