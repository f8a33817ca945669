package train

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
)

// TestKindsOfErrors checks that each error a program can act on matches its kind, also when
// wrapped, and no other kind.
func TestKindsOfErrors(t *testing.T) {
	t.Parallel()
	kinds := []error{ErrConfig, ErrDoesNotFit, ErrNoDevice, ErrDiverged, ErrDamaged, ErrLost}
	c := tiny("gpt2")
	_, refused := func(c request) request { c.Steps = 0; return c }(c).start(context.Background())
	c.DeviceMemory = 1
	_, small := c.start(context.Background())
	_, planned := c.planned().Plan(t.Context())
	_, fitted := c.planned().Fit(t.Context(), planner.Fixed{}, 0, briefly(1))
	for _, e := range []struct{ err, kind error }{
		{refused, ErrConfig}, {small, ErrDoesNotFit}, {planned, ErrDoesNotFit}, {fitted, ErrDoesNotFit},
		{&MachineTooSmall{Ranks: 1}, ErrDoesNotFit}, {&Diverged{Step: 1}, ErrDiverged}, {&platform.MissingDevice{Device: "cuda", Err: errors.New("none")}, ErrNoDevice},
	} {
		require.Error(t, e.err)
		for _, k := range kinds {
			require.Equal(t, k == e.kind, errors.Is(fmt.Errorf("wrapped: %w", e.err), k), "%v: %v", e.err, k)
		}
	}
}
