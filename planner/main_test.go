package planner

import (
	"os"
	"testing"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }

// tiny is a request for a small model of the reference folder.
func tiny(model string) Request {
	c := Request{Config: config.Default()}
	c.Model, c.Init, c.Data, c.Order = "../testdata/"+model, "../testdata/"+model, "../testdata/text.bin", "sequential"
	c.Batch, c.Seq, c.Steps = 2, 40, 20
	c.Verify = true
	return c
}
