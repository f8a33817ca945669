// Command spillway plans and trains models that are larger than one device.
package main

import (
	"os"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/relay"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
)

func main() {
	status, relayed := relay.Run()
	if !relayed {
		status = root.Execute(os.Args[1:], os.Stdout, os.Stderr)
	}
	os.Exit(status)
}
