// Package cancel cancels contexts after a chosen number of checks.
package cancel

import (
	"context"
	"math"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// Watched is a context that is canceled at a chosen call of Err.
type Watched struct {
	context.Context
	End   context.CancelFunc
	at    int64
	Looks atomic.Int64
}

// At returns a context that is canceled at the check with that number, from 1.
func At(look int64) *Watched {
	l := &Watched{at: look}
	l.Context, l.End = context.WithCancel(context.Background())
	return l
}

func (l *Watched) Err() error {
	if l.Looks.Add(1) >= l.at {
		l.End()
	}
	return l.Context.Err()
}

// Leaves cancels a call at its first check of the context, at the second, and at the middle one of
// those that it makes if it is not canceled.
func Leaves(t *testing.T, name string, least int64, call func(context.Context) error) {
	t.Helper()
	whole := At(math.MaxInt64)
	require.NoError(t, call(whole), name)
	n := whole.Looks.Load()
	require.GreaterOrEqual(t, n, least, "%s looks at its context", name)
	for _, at := range []int64{1, min(2, n), max(n/2, 1)} {
		ctx := At(at)
		require.ErrorIs(t, call(ctx), context.Canceled, "%s, at look %d of %d", name, at, n)
		ctx.End()
	}
	whole.End()
}
