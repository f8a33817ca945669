package nearest

import "fmt"

// Divisors lists the divisors of n (at least 1) just below and above k, for an error that
// suggests valid values.
func Divisors(n, k int) string {
	below, above := 0, 0
	for d := 1; d <= n/d; d++ {
		if n%d != 0 {
			continue
		}
		for _, v := range [2]int{d, n / d} {
			if v < k && v > below {
				below = v
			}
			if v > k && (above == 0 || v < above) {
				above = v
			}
		}
	}
	switch {
	case below == 0:
		return fmt.Sprint(above)
	case above == 0:
		return fmt.Sprint(below)
	}
	return fmt.Sprintf("%d or %d", below, above)
}
