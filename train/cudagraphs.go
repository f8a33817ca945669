package train

import (
	"strings"
	"sync"
)

// Values of Config.CUDAGraphs.
const (
	graphsAuto = "auto"
	graphsOff  = "off"
)

var cudaGraphs = []string{"", graphsAuto, graphsOff}

// withoutGraphs says why a run on GPUs launches an operation at a time; "" where it launches
// runs of them as CUDA graphs.
func (c *Config) withoutGraphs() string {
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

// Device describes the device in a line; "" for the CPU.
func (t *Trainer) Device() string {
	about := t.platform.About()
	if t.platform.GPU() == nil || about == "" {
		return about
	}
	if why := t.cfg.withoutGraphs(); why != "" {
		return about + "; no CUDA graphs: " + why
	}
	return about + "; CUDA graphs from the second step on"
}

// warnOnce is Warn for the ranks, each on a goroutine of its own: what the first says
// stands for all.
func (c *Config) warnOnce() func(string) {
	var once sync.Once
	return func(line string) { once.Do(func() { c.warn("%s", line) }) }
}
