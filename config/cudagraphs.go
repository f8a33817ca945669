package config

import (
	"fmt"
	"strings"
	"sync"
)

// Values of Config.CUDAGraphs.
const (
	graphsAuto = "auto"
	graphsOff  = "off"
)

var cudaGraphs = []string{"", graphsAuto, graphsOff}

// WithoutGraphs says why a run on GPUs launches each operation separately; "" if it uses CUDA
// graphs.
func (c *Config) WithoutGraphs() string {
	switch {
	case strings.EqualFold(c.CUDAGraphs, graphsOff):
		return "Config.CUDAGraphs off"
	case c.Trace != "":
		return "Config.Trace times each operation"
	case c.Measure:
		return "each operation is measured"
	}
	return ""
}

// WarnOnce is Warn for use by the ranks' goroutines: only the first call is reported.
func (c *Config) WarnOnce() func(string) {
	var once sync.Once
	return func(line string) { once.Do(func() { c.Warnf("%s", line) }) }
}

func (c *Config) Warnf(format string, args ...any) {
	if c.Warn != nil {
		c.Warn(fmt.Sprintf(format, args...))
	}
}
