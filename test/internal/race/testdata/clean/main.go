// Command clean has two goroutines write one variable, one after the other.
package main

var shared int

func main() {
	done := make(chan struct{})
	go func() {
		shared++
		close(done)
	}()
	<-done
	shared++
}
