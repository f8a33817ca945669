//go:build !linux

package launch

import (
	"context"
	"errors"
	"io"
	"os"
	"runtime"
)

var errSystem = errors.New("launch needs Linux; this is " + runtime.GOOS)

func stream(int) (io.ReadWriteCloser, error) { return nil, errSystem }

// CPUs returns nil: the processors are unknown.
func CPUs() []int { return nil }

func run(context.Context, Options, <-chan os.Signal) (End, error) { return End{}, errSystem }
