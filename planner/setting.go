package planner

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/search"
)

// Setting is a field and its value as text.
type Setting struct {
	// Field is a field of Config, such as "Config.Zero", or of the hardware: "Hardware.Device",
	// "Hardware.Nodes", "Hardware.PerNode" or "Hardware.HostShare".
	Field, Value string
}

// Settings are fields that together replace those of a configuration.
type Settings []Setting

// String lists the settings, as in "Config.Zero 3 Config.Prefetch 1".
func (s Settings) String() string {
	words := make([]string, 0, 2*len(s))
	for _, set := range s {
		words = append(words, set.Field, set.Value)
	}
	return Shell(words)
}

func (s *Settings) add(field string, value any) {
	*s = append(*s, Setting{"Config." + field, fmt.Sprint(value)})
}

// choices returns a search's choices. It also lists values such as "none": the configuration that
// was asked for may have had another.
func choices(c *search.Spec, batches, precisions bool) (s Settings) {
	s.add("Zero", c.Stage)
	if batches {
		s.add("Batch", c.Batch)
		s.add("Accum", c.Accum)
	}
	if precisions {
		s.add("Precision", c.Precision)
	}
	if c.Accum > 1 && c.LayerOrder || c.OrderChosen {
		s.add("AccumOrder", orderName(c.LayerOrder))
	}
	s.add("Prefetch", c.Prefetch)
	s.add("Recompute", c.Recompute)
	s.add("Offload", cmp.Or(c.Offload.String(), "none"))
	return s
}

// changeFields names the field of each kind of change.
var changeFields = map[search.Field]string{search.Device: "Hardware.Device", search.Nodes: "Hardware.Nodes", search.PerNode: "Hardware.PerNode", search.Ranks: "Config.Ranks",
	search.ShardSize: "Config.ShardSize", search.Stage: "Config.Zero", search.Batch: "Config.Batch", search.Accum: "Config.Accum", search.LayerOrder: "Config.AccumOrder",
	search.Seq: "Config.Seq", search.Precision: "Config.Precision", search.Prefetch: "Config.Prefetch", search.Recompute: "Config.Recompute", search.Disk: "Config.Disk",
	search.Offload: "Config.Offload"}

// settingsOf converts a search's changes to settings; local is the number of ranks on a server.
func settingsOf(list []search.Change, local int) (s Settings) {
	for _, c := range list {
		value := fmt.Sprint(c.Number)
		switch c.Field {
		case search.Device:
			value = c.Text
		case search.LayerOrder:
			value = orderName(c.On)
		case search.Precision:
			value = c.Precision.String()
		case search.Recompute:
			if value = c.Text; c.On {
				value = recompute.Auto
			}
		case search.Disk:
			value = newDisk
		case search.Offload:
			value = cmp.Or(c.Text, "none")
		}
		field := changeFields[c.Field]
		switch c.Field {
		case search.HostMemory:
			field, value = "Hardware.HostShare", fmt.Sprint(c.Bytes*int64(max(local, 1)))
		case search.Other:
			field, value, _ = strings.Cut(c.Text, " ")
		}
		s = append(s, Setting{field, value})
	}
	return s
}

// Shell quotes words for a shell and joins them.
func Shell(args []string) string {
	words := make([]string, len(args))
	for i, a := range args {
		words[i] = quote(a)
	}
	return strings.Join(words, " ")
}
