package rollcall

import (
	"os"
	"testing"

	"github.com/spillway-ml/spillway/internal/ownworld"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }
