// Command build builds the cluster's programs, as the tests do where they are missing:
//
//	go run -C e2e ./build
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/dnsguard/dnsguard/e2e/kubelab"
)

func main() {
	if _, err := kubelab.Build(context.Background(), "..", os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "build:", err)
		os.Exit(1)
	}
}
