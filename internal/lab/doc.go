// Package lab is a laboratory of network namespaces, made by this process
// alone: no external program, no name in /run/netns, no file that stays. The
// project's kernel tests run in it, and "dnsguard demo" plays its scenarios in
// it with the real daemon.
//
//	 gateway (swallows what it gets)
//	    |172.30.0.1
//	    |172.30.0.2
//	 node ......... nftables table kube-proxy: 10.96.0.10:53 -> a random endpoint
//	    |           conntrack, child processes (the daemon under test)
//	    |10.244.0.1 on each veth
//	----+-------------+---------------+-------
//	    |10.244.0.2   |10.244.0.3     |10.244.0.4 ...
//	  DNSPod        DNSPod           Pod
//	  DNSServer     DNSServer        PinnedClient, FreshClient, Load
//
// All of it has IPv6 twins (fd00:172:30::/64, fd00:10:244::/64,
// [fd00:10:96::a]:53) where the kernel has IPv6.
//
// # How it holds together
//
// A Namespace is a file descriptor. Code enters it with Do, on a thread of its
// own; a socket made there stays in it, and any goroutine may use it. So the
// stand-in DNS servers and the clients of many pods are goroutines of one
// process. A child process inherits the namespace of the thread that starts
// it; that thread lives as long as the child, because the kernel ties the
// child's death signal to it.
//
// Tests build laboratories through package labtest, which decides whether the
// machine can hold one. Programs play scenarios through RunDemo; a scenario
// starts the executable that it is given, so what it shows is the real daemon.
//
// # Invariants
//
//   - Nothing outlives the process, even after kill -9: namespaces, links,
//     rules, child processes and the children's files belong to the kernel's
//     reference counts, not to a clean-up that has to run.
//   - The machine's own namespace, its rules, routes and sysctls are never
//     changed; every test packet stays in namespaces made here.
//   - The process's main thread never enters a namespace.
//   - Rules change in one transaction; no packet meets half a Service.
//   - The address of a dead pod is silent: clients time out, as on a network,
//     instead of learning by ICMP that nobody is there.
//   - The stand-in for kube-proxy never touches conntrack. That is the outage:
//     a client that keeps its source port keeps its dead endpoint.
//
// References: namespaces(7), setns(2), prctl(2) PR_SET_PDEATHSIG, veth(4), the
// kernel's nf_conntrack-sysctl.rst; RFC 1034 and 1035 for the stand-in server,
// RFC 2308 for its denials, RFC 6891 for its EDNS.
package lab
