package kubelab

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// poll is how often what nothing announces is looked at.
const poll = 10 * time.Millisecond

// Await looks until ok says that something has come, or ctx is done; the error
// then tells what did not come and the last that ok said against it.
func Await(ctx context.Context, what string, ok func(context.Context) error) error {
	for {
		err := ok(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w; at last: %w", what, context.Cause(ctx), err)
		case <-time.After(poll):
		}
	}
}

// ip runs commands of iproute2 in a namespace.
func ip(ns *lab.Namespace, commands ...string) error {
	return ipFamily(ns, "-N", commands...)
}

// ipFamily is ip for commands that cannot tell the family (-4 or -6) by
// themselves.
func ipFamily(ns *lab.Namespace, family string, commands ...string) error {
	return ns.Do(func() error {
		cmd := exec.CommandContext(context.Background(), "ip", family, "-batch", "-")
		cmd.Stdin = strings.NewReader(strings.Join(commands, "\n") + "\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("ip in %s: %w: %s\n%s", ns, err, bytes.TrimSpace(out), strings.Join(commands, "\n"))
		}
		return nil
	})
}

// Output runs a program of the machine in a namespace to its end and returns
// what it printed: how tests look at the kernel's tables.
func Output(ctx context.Context, ns *lab.Namespace, name string, args ...string) (string, error) {
	var out []byte
	err := ns.Do(func() (err error) {
		if out, err = exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
			err = fmt.Errorf("%s %v in %s: %w: %s", name, args, ns, err, bytes.TrimSpace(out))
		}
		return err
	})
	return string(out), err
}

// plug connects spoke, as a pod is connected to its node: hub's end of the link
// has hub's addresses with no network around them, and a route to each of
// spoke's addresses and networks; spoke's default route leads to hub.
func plug(hub *lab.Namespace, link string, hubAddrs []netip.Addr, spoke *lab.Namespace, addrs []netip.Addr, networks ...netip.Prefix) error {
	var fd *os.File
	err := spoke.Do(func() (err error) {
		fd, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return err
	}
	defer func() { _ = fd.Close() }()
	here := []string{
		fmt.Sprintf("link add %s type veth peer name eth0 netns /proc/%d/fd/%d", link, os.Getpid(), fd.Fd()),
		"link set " + link + " up",
	}
	there := []string{"link set eth0 up"}
	for _, a := range addrs {
		there = append(there, fmt.Sprintf("addr add %v dev eth0%s", whole(a), nodad(a)))
	}
	for _, a := range hubAddrs {
		here = append(here, fmt.Sprintf("addr add %v dev %s%s", whole(a), link, nodad(a)))
		there = append(there,
			fmt.Sprintf("route add %v dev eth0", whole(a)),
			fmt.Sprintf("route add %v via %v dev eth0", netip.PrefixFrom(a, 0).Masked(), a))
	}
	for _, a := range addrs {
		here = append(here, fmt.Sprintf("route add %v dev %s", whole(a), link))
	}
	for _, n := range networks {
		for _, a := range addrs {
			if a.Is4() == n.Addr().Is4() {
				here = append(here, fmt.Sprintf("route add %v via %v dev %s", n, a, link))
			}
		}
	}
	if err := ip(hub, here...); err != nil {
		return err
	}
	return ip(spoke, there...)
}

// whole is the prefix that holds one address.
func whole(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// nodad makes an IPv6 address work at once: nobody else is on the link.
func nodad(a netip.Addr) string {
	if a.Is6() {
		return " nodad"
	}
	return ""
}

// router lets a namespace forward.
func router(ns *lab.Namespace) error {
	for _, family := range []string{"ipv4", "ipv6"} {
		if err := ns.Sysctl("net."+family+".conf.all.forwarding", "1"); err != nil {
			return err
		}
	}
	return nil
}

// httpClient asks from inside a namespace.
func httpClient(ns *lab.Namespace) *http.Client {
	return &http.Client{
		Timeout: 2 * time.Second,
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				return ns.Dial(ctx, network, addr)
			},
		},
	}
}

// healthy asks for a page that says 200 when all is well.
func healthy(ctx context.Context, ns *lab.Namespace, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := httpClient(ns).Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s says %s", url, resp.Status)
	}
	return nil
}
