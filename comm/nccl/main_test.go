//go:build linux

package nccl_test

import (
	"os"
	"testing"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestMain(m *testing.M) {
	ownworld.ManyAtOnce()
	os.Exit(ownworld.Run(m))
}
