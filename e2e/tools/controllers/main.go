// Command controllers runs two of kube-controller-manager's controllers, started as
// kube-controller-manager starts them: the EndpointSlice controller and the DaemonSet
// controller. Kubernetes' own main function links forty more, and cloud providers' and
// storage's libraries with them: a fifth of all the time that it takes to build the
// cluster's programs.
package main

import (
	"context"
	"flag"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"k8s.io/kubernetes/pkg/controller/daemon"
	"k8s.io/kubernetes/pkg/controller/endpointslice"
)

// What kube-controller-manager has by default: its client's limits for each
// controller, how often informers look at everything again, and the controllers' own
// settings.
const (
	qps                  = 20
	burst                = 30
	resync               = 12 * time.Hour
	endpointsPerSlice    = 100
	endpointUpdatesBatch = 0
	endpointWorkers      = 5
	daemonWorkers        = 2
	daemonBackoff        = time.Second
	daemonBackoffMax     = 15 * time.Minute
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "the file that names the API server")
	klog.InitFlags(nil)
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, *kubeconfig); err != nil {
		klog.ErrorS(err, "controllers")
		os.Exit(1)
	}
}

func run(ctx context.Context, kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.Burst = qps, burst
	config.ContentType = runtime.ContentTypeProtobuf
	client := func(name string) kubernetes.Interface {
		return kubernetes.NewForConfigOrDie(rest.AddUserAgent(config, name))
	}
	factory := informers.NewSharedInformerFactory(client("shared-informers"), resync)
	core := factory.Core().V1()
	slices := endpointslice.NewController(ctx, core.Pods(), core.Services(), core.Nodes(), factory.Discovery().V1().EndpointSlices(),
		endpointsPerSlice, client("endpointslice-controller"), endpointUpdatesBatch)
	daemons, err := daemon.NewDaemonSetsController(ctx, factory.Apps().V1().DaemonSets(), factory.Apps().V1().ControllerRevisions(),
		core.Pods(), core.Nodes(), client("daemon-set-controller"), flowcontrol.NewBackOff(daemonBackoff, daemonBackoffMax))
	if err != nil {
		return err
	}
	go slices.Run(ctx, endpointWorkers)
	go daemons.Run(ctx, daemonWorkers)
	factory.Start(ctx.Done())
	<-ctx.Done()
	return nil
}
