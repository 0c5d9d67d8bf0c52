package kubelab

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	coreclient "k8s.io/client-go/kubernetes/typed/core/v1"
	discoveryclient "k8s.io/client-go/kubernetes/typed/discovery/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/dnsguard/dnsguard/internal/lab"
)

// Where things are.
const (
	apiServer    = "172.30.0.2:6443"   // from anywhere in the laboratory
	apiService   = "https://10.96.0.1" // by way of kube-proxy
	serviceCIDRs = "10.96.0.0/16,fd00:10:96::/112"
	podCIDRs     = "10.244.0.0/16,fd00:10:244::/48"
	masters      = "system:masters"
)

// Addresses of the cluster's DNS Service, and of the world's DNS server.
var (
	DNS4     = netip.MustParseAddrPort("10.96.0.10:53")                                               //nolint:gochecknoglobals // a constant that Go cannot spell
	DNS6     = netip.MustParseAddrPort("[fd00:10:96::a]:53")                                          //nolint:gochecknoglobals // a constant that Go cannot spell
	worldDNS = netip.MustParseAddrPort("203.0.113.53:53")                                             //nolint:gochecknoglobals // a constant that Go cannot spell
	wireAddr = []netip.Addr{netip.MustParseAddr("172.30.0.1"), netip.MustParseAddr("fd00:172:30::1")} //nolint:gochecknoglobals // a constant that Go cannot spell
)

// Cluster is a control plane, and the network between nodes. It has no nodes at
// first. Methods are not safe for concurrent use.
type Cluster struct {
	// Core and Discovery speak to the API server with all rights.
	Core      coreclient.CoreV1Interface
	Discovery discoveryclient.DiscoveryV1Interface
	Admin     *rest.Config
	World     *lab.DNSServer // DNS outside of the cluster: lab.ExternalZone, and nothing else exists

	components *Components
	authority  *authority
	wire       *lab.Namespace
	control    *lab.Namespace
	internet   *lab.Namespace
	etcd       *Program
	api        *Program
	manager    *Program
	apiFiles   map[string][]byte
	nodes      int // ever made
}

// Start starts a control plane with an empty kube-dns Service. Close it.
func Start(ctx context.Context, components *Components) (c *Cluster, err error) {
	c = &Cluster{components: components}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("start the control plane: %w\n%s", err, c.Logs(20)), c.Close())
			c = nil
		}
	}()
	if err = c.connect(ctx); err != nil {
		return c, err
	}
	if err = c.credentials(); err != nil {
		return c, err
	}
	if c.etcd, err = start(c.control, "etcd", components.path("server"), []string{
		"--data-dir=/run/etcd", "--unsafe-no-fsync", "--log-level=warn",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380",
	}, nil); err != nil {
		return c, err
	}
	if err = c.StartAPI(ctx); err != nil {
		return c, err
	}
	return c, c.objects(ctx)
}

// connect makes the namespaces that all nodes share.
func (c *Cluster) connect(ctx context.Context) error {
	for name, ns := range map[string]**lab.Namespace{"wire": &c.wire, "control": &c.control, "internet": &c.internet} {
		var err error
		if *ns, err = lab.NewNamespace(name); err != nil {
			return err
		}
	}
	if err := router(c.wire); err != nil {
		return err
	}
	err := plug(c.wire, "control", wireAddr, c.control, []netip.Addr{netip.MustParseAddr("172.30.0.2"), netip.MustParseAddr("fd00:172:30::2")})
	if err != nil {
		return err
	}
	if err := plug(c.wire, "internet", wireAddr, c.internet, []netip.Addr{worldDNS.Addr()}); err != nil {
		return err
	}
	root, err := lab.ParseZone(".", "$TTL 60\n@ SOA ns.invalid. nobody.invalid. 1 7200 1800 86400 60\n")
	if err != nil {
		return err
	}
	c.World, err = lab.NewDNSServer(ctx, c.internet, []*lab.Zone{lab.ExternalZone(), root}, worldDNS)
	return err
}

// credentials makes the certificates, and the clients of this process.
func (c *Cluster) credentials() error {
	var err error
	if c.authority, err = newAuthority(); err != nil {
		return err
	}
	cert, key, err := c.authority.server("172.30.0.2", "10.96.0.1", "fd00:10:96::1", "127.0.0.1")
	if err != nil {
		return err
	}
	signer, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	private, err := x509.MarshalECPrivateKey(signer)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&signer.PublicKey)
	if err != nil {
		return err
	}
	c.apiFiles = map[string][]byte{
		"pki/ca.crt": c.authority.pem, "pki/tls.crt": cert, "pki/tls.key": key,
		"pki/sa.key": pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}),
		"pki/sa.pub": pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}),
	}
	config, err := c.authority.kubeconfig("https://"+apiServer, "e2e", masters)
	if err != nil {
		return err
	}
	if c.Admin, err = clientcmd.RESTConfigFromKubeConfig(config); err != nil {
		return err
	}
	c.Admin.QPS = -1 // no limit of our own
	c.Admin.Timeout = 10 * time.Second
	c.Admin.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		return c.control.Dial(ctx, network, addr)
	}
	if c.Core, err = coreclient.NewForConfig(c.Admin); err != nil {
		return err
	}
	c.Discovery, err = discoveryclient.NewForConfig(c.Admin)
	return err
}

// StartAPI starts the API server, which must not be running, waits until it is
// ready, and starts the controllers.
func (c *Cluster) StartAPI(ctx context.Context) error {
	if err := c.startServer(ctx); err != nil {
		return err
	}
	config, err := c.authority.kubeconfig("https://"+apiServer, "controllers", masters)
	if err != nil {
		return err
	}
	c.manager, err = start(c.control, "kube-controller-manager", c.components.path("kube-controller-manager"), []string{
		"--kubeconfig=/run/kubeconfig", "--controllers=endpointslice-controller,daemonset-controller", "--leader-elect=false",
		"--authentication-skip-lookup=true", "--bind-address=127.0.0.1",
	}, map[string][]byte{"kubeconfig": config})
	return err
}

func (c *Cluster) startServer(ctx context.Context) error {
	var err error
	c.api, err = start(c.control, "kube-apiserver", c.components.path("kube-apiserver"), []string{
		"--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443", "--advertise-address=172.30.0.2",
		"--service-cluster-ip-range=" + serviceCIDRs,
		"--tls-cert-file=/run/pki/tls.crt", "--tls-private-key-file=/run/pki/tls.key", "--client-ca-file=/run/pki/ca.crt",
		"--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=/run/pki/sa.pub", "--service-account-signing-key-file=/run/pki/sa.key",
		"--disable-admission-plugins=ServiceAccount", // nobody makes default accounts here
		"--enable-priority-and-fairness=false", "--profiling=false",
	}, c.apiFiles)
	if err != nil {
		return err
	}
	client, err := rest.HTTPClientFor(c.Admin)
	if err != nil {
		return err
	}
	return Await(ctx, "kube-apiserver is ready", func(ctx context.Context) error {
		if err := c.api.Running(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+apiServer+"/readyz", http.NoBody)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("/readyz: %s", resp.Status)
		}
		return nil
	})
}

// KillAPI ends the API server at once, and the controllers, which would end
// themselves when they lose their lease. What the server stored stays.
func (c *Cluster) KillAPI() {
	c.manager.Kill()
	c.api.Kill()
}

// APIRunning tells whether the API server has not ended.
func (c *Cluster) APIRunning() bool { return c.api.Running() == nil }

// Kubeconfig is a file for a user in groups, whom RBAC knows by these names, to
// reach the API server as pods and kube-proxy do not have to: the ClusterIP when
// service is true, else the server itself.
func (c *Cluster) Kubeconfig(service bool, user string, groups ...string) ([]byte, error) {
	server := "https://" + apiServer
	if service {
		server = apiService
	}
	return c.authority.kubeconfig(server, user, groups...)
}

// objects makes what every cluster has, and kube-dns.
func (c *Cluster) objects(ctx context.Context) error {
	// The API server makes kube-system and default in its own time.
	err := Await(ctx, "namespaces", func(ctx context.Context) error {
		for _, name := range []string{"default", "kube-system"} {
			if _, err := c.Core.Namespaces().Get(ctx, name, metav1.GetOptions{}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return Await(ctx, "kube-dns", func(ctx context.Context) error {
		_, err := c.Core.Services("kube-system").Create(ctx, dnsService(), metav1.CreateOptions{})
		return err
	})
}

// dnsService is kube-dns as kubeadm makes it, for both families.
func dnsService() *corev1.Service {
	both := corev1.IPFamilyPolicyRequireDualStack
	port := func(name string, protocol corev1.Protocol, number int32) corev1.ServicePort {
		return corev1.ServicePort{Name: name, Protocol: protocol, Port: number, TargetPort: intstr.FromInt32(number)}
	}
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Name: "kube-dns", Namespace: "kube-system",
			Labels: map[string]string{"k8s-app": dnsApp, "kubernetes.io/name": "CoreDNS"},
		},
		Spec: corev1.ServiceSpec{
			ClusterIP:      DNS4.Addr().String(),
			ClusterIPs:     []string{DNS4.Addr().String(), DNS6.Addr().String()},
			IPFamilyPolicy: &both,
			Selector:       map[string]string{"k8s-app": dnsApp},
			Ports: []corev1.ServicePort{
				port("dns", corev1.ProtocolUDP, 53), port("dns-tcp", corev1.ProtocolTCP, 53), port("metrics", corev1.ProtocolTCP, 9153),
			},
		},
	}
}

// RemoveDNSService deletes kube-dns, and returns what makes it anew, with the addresses
// that it had.
func (c *Cluster) RemoveDNSService(ctx context.Context) (restore func() error, err error) {
	const namespace, name = "kube-system", "kube-dns"
	s, err := c.Core.Services(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	s.ObjectMeta = metav1.ObjectMeta{Name: s.Name, Labels: s.Labels}
	return func() error {
		_, err := c.Core.Services(namespace).Create(context.Background(), s, metav1.CreateOptions{})
		return err
	}, c.Core.Services(namespace).Delete(ctx, name, metav1.DeleteOptions{})
}

// Logs returns the last lines of what the control plane's programs printed.
func (c *Cluster) Logs(lines int) string {
	return logs(lines, c.etcd, c.api, c.manager)
}

// Close ends the control plane. Nodes must have been closed.
func (c *Cluster) Close() error {
	var errs []error
	if c.World != nil {
		errs = append(errs, c.World.Close())
	}
	// The clients first: the last thing in a log should not be their surprise.
	for _, p := range []*Program{c.manager, c.api, c.etcd} {
		if p != nil {
			p.Kill()
		}
	}
	for _, ns := range []*lab.Namespace{c.internet, c.control, c.wire} {
		if ns != nil {
			errs = append(errs, ns.Close())
		}
	}
	return errors.Join(errs...)
}
