package planning

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/internal/published"
	"github.com/spillway-ml/spillway/plan"
)

func seconds(v float64) string {
	days := v / (24 * time.Hour).Seconds()
	if days >= 10 {
		return grouped(int64(days)) + " days"
	}
	d := time.Duration(v * 1e9)
	switch {
	case days >= 2:
		return fmt.Sprintf("%.1f days", days)
	case d >= time.Minute:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return fmt.Sprintf("%.2f s", v)
	case d >= time.Millisecond:
		return fmt.Sprintf("%.1f ms", v*1e3)
	}
	return fmt.Sprintf("%.0f µs", v*1e6)
}

// roughSeconds formats a time with two digits.
func roughSeconds(v float64) string {
	v = rough(v)
	switch {
	case v >= 120:
		return fmt.Sprintf("%.0f min", rough(v/60))
	case v >= 10:
		return fmt.Sprintf("%.0f s", v)
	case v >= 1:
		return fmt.Sprintf("%.1f s", v)
	case v >= 0.01:
		return fmt.Sprintf("%.0f ms", v*1e3)
	case v >= 0.001:
		return fmt.Sprintf("%.1f ms", v*1e3)
	}
	return fmt.Sprintf("%.0f µs", v*1e6)
}

// rough rounds to two digits.
func rough(v float64) float64 {
	if v <= 0 {
		return 0
	}
	digits, _ := strconv.ParseFloat(strconv.FormatFloat(v, 'e', 1, 64), 64)
	return digits
}

// between joins the ends of a range, with a common unit only once.
func between(low, high string) string {
	a, unit, ok := strings.Cut(low, " ")
	b, other, _ := strings.Cut(high, " ")
	switch {
	case low == high:
		return low
	case ok && unit == other:
		return a + "–" + b + " " + unit
	}
	return low + "–" + high
}

// grouped formats a number with separated thousands.
func grouped(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// millions formats a number in millions, briefly, as a table has four columns.
func millions(v float64) string { return strconv.FormatFloat(rough(v/1e6), 'f', -1, 64) }

// inWords formats a number of tokens in words, such as 15 trillion.
func inWords(v float64) string {
	for _, u := range []struct {
		of   float64
		name string
	}{{1e12, " trillion"}, {1e9, " billion"}, {1e6, " million"}} {
		if v >= u.of {
			return fmt.Sprintf("%.4g%s", v/u.of, u.name)
		}
	}
	return fmt.Sprintf("%.0f", v)
}

// scaled formats a plan's bytes multiplied by a range of factors.
func scaled(m published.Memory, bytes int64) string {
	low, high := plan.Bytes(int64(m.Low*float64(bytes))), plan.Bytes(int64(m.High*float64(bytes)))
	return between(low, high)
}
